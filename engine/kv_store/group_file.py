"""The file of one (segment, layer group): a 4 KiB header, then the layers, each starting on a 4 KiB boundary.

Header, little endian: magic, format version, tokens [start, end), first layer, number of layers, bytes per token, the
segment's key (which covers tenant, engine digest and all tokens up to `end`), one xxh3-128 a layer, zeros; the last 16
bytes are the xxh3-128 of all before them. Every field is compared with what the reader expects, so a file put in
another's place is as good as a damaged one.
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128_digest

from engine.errors import KVCorrupt
from engine.interfaces import KVLayout
from engine.kv_store.layout import ALIGNMENT, aligned, group_file_bytes, group_layers

MAGIC = b"FWKVGRP\0"
FORMAT_VERSION = 1
CHECKSUM_BYTES = 16
_FIXED = struct.Struct(
    "<8sIIQQIIQ32s"
)  # magic, version, header bytes, start, end, first layer, layers, bytes/token, key


@dataclass(frozen=True)
class GroupFile:
    """Which block a file holds, or must hold."""

    key: str  # 64 hex digits
    start: int
    end: int
    group: int
    layout: KVLayout

    @property
    def layers(self) -> range:
        return group_layers(self.layout, self.group)

    @property
    def layer_bytes(self) -> int:
        return self.layout.layer_bytes(self.end - self.start)

    @property
    def size_bytes(self) -> int:
        return group_file_bytes(self.layout, self.end - self.start, self.group)

    def offset(self, layer: int) -> int:
        return ALIGNMENT + (layer - self.layers.start) * aligned(self.layer_bytes)

    def encode_header(self, checksums: Sequence[bytes]) -> bytes:
        """The 4 KiB header over one checksum a layer."""
        fixed = self._fixed()
        body = (fixed + b"".join(checksums)).ljust(ALIGNMENT - CHECKSUM_BYTES, b"\0")
        return body + xxh3_128_digest(body)

    def decode_header(self, header: bytes) -> list[bytes]:
        """The layers' checksums. Raises KVCorrupt if `header` is damaged or another block's."""
        if len(header) != ALIGNMENT:
            raise KVCorrupt(f"header has {len(header)} bytes, expected {ALIGNMENT}")
        body, checksum = header[:-CHECKSUM_BYTES], header[-CHECKSUM_BYTES:]
        if xxh3_128_digest(body) != checksum:
            raise KVCorrupt("header does not match its checksum")
        if body[: _FIXED.size] != self._fixed():
            raise KVCorrupt(f"header is of another block: {_describe(body)}, expected {_describe(self._fixed())}")
        table = body[_FIXED.size : _FIXED.size + len(self.layers) * CHECKSUM_BYTES]
        return [table[i : i + CHECKSUM_BYTES] for i in range(0, len(table), CHECKSUM_BYTES)]

    def _fixed(self) -> bytes:
        return _FIXED.pack(
            MAGIC,
            FORMAT_VERSION,
            ALIGNMENT,
            self.start,
            self.end,
            self.layers.start,
            len(self.layers),
            self.layout.bytes_per_token,
            bytes.fromhex(self.key),
        )


def _describe(body: bytes) -> str:
    magic, version, _, start, end, first, count, per_token, key = _FIXED.unpack_from(body)
    where = f"{key.hex()[:12]} tokens {start}-{end} layers {first}+{count}"
    return f"{magic!r} v{version} {where} of {per_token} bytes a token"


class GroupFileReader:
    """Reads one group file; the header is checked when it is opened, each layer when it is read."""

    def __init__(self, path: Path, block: GroupFile) -> None:
        """Raises KVCorrupt, OSError."""
        self._block = block
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(self._fd).st_size
            if size != block.size_bytes:
                raise KVCorrupt(f"file has {size} bytes, expected {block.size_bytes}")
            self._checksums = block.decode_header(os.pread(self._fd, ALIGNMENT, 0))
        except BaseException:
            os.close(self._fd)
            raise

    def read_into(self, layer: int, buffer: memoryview) -> None:
        """Fill `buffer` ([layer_bytes], bytes) with one layer and check it. Raises KVCorrupt, OSError."""
        offset, done = self._block.offset(layer), 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                raise KVCorrupt(f"file ends inside layer {layer}")
            done += count
        if xxh3_128_digest(buffer) != self._checksums[layer - self._block.layers.start]:
            raise KVCorrupt(f"layer {layer} does not match its checksum")

    def check(self) -> None:
        """Read and check every layer. Raises KVCorrupt, OSError."""
        buffer = memoryview(bytearray(self._block.layer_bytes))
        for layer in self._block.layers:
            self.read_into(layer, buffer)

    def close(self) -> None:
        os.close(self._fd)
