"""The file of one (segment, layer group): a 4 KiB header, then the layers, each starting on a 4 KiB boundary.

Header, little endian: magic, format version, header bytes, tokens [start, end), first layer, number of layers, bytes a
token, the segment's key (which covers tenant, engine digest and all tokens up to `end`); in version 2, whose layers are
encrypted, the key's id and a salt; one xxh3-128 a layer as it is stored, in version 2 each with the layer's tag; zeros;
the last 16 bytes are the xxh3-128 of all before them. Every field is compared with what the reader expects, so a file
put in another's place is as good as a damaged one.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128_digest

from engine.errors import KVCorrupt, KVSealed
from engine.interfaces import KVLayout
from engine.kv_store.layout import ALIGNMENT, aligned, group_file_bytes, group_layers
from engine.kv_store.sealing import KEY_ID_BYTES, SALT_BYTES, TAG_BYTES, Keyring, Seal

MAGIC = b"FWKVGRP\0"
PLAIN, SEALED = 1, 2  # format versions
CHECKSUM_BYTES = 16
MAX_SEALED_LAYERS = 120  # what a header has room for
_LINUX = hasattr(os, "O_DIRECT") and hasattr(os, "RWF_NOWAIT")
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

    def encode_layer(
        self, layer: int, data: bytes | memoryview, keyring: Keyring | None, seal: Seal | None
    ) -> tuple[bytes | memoryview, bytes]:
        """What is stored of a layer, and its entry in the header."""
        if keyring is None or seal is None:
            return data, xxh3_128_digest(data)
        sealed, tag = keyring.seal(seal, layer, bytes(data), self._fixed(SEALED))
        return sealed, xxh3_128_digest(sealed) + tag

    def decode_layer(
        self, layer: int, stored: bytes | memoryview, header: "Header", keyring: Keyring | None
    ) -> bytes | None:
        """Check what is stored of a layer; returns what it decrypts to, None where it is not encrypted.

        Raises KVCorrupt, KVSealed.
        """
        self.check_layer(layer, stored, header)
        if header.seal is None:
            return None
        if keyring is None:
            raise KVSealed(f"sealed with key {header.seal.key_id.hex()}, and no key was given")
        tag = header.entries[layer - self.layers.start][CHECKSUM_BYTES:]
        return keyring.unseal(header.seal, layer, bytes(stored), tag, self._fixed(SEALED))

    def check_layer(self, layer: int, stored: bytes | memoryview, header: "Header") -> None:
        """Without opening it. Raises KVCorrupt."""
        if xxh3_128_digest(stored) != header.entries[layer - self.layers.start][:CHECKSUM_BYTES]:
            raise KVCorrupt(f"layer {layer} does not match its checksum")

    def encode_header(self, entries: Sequence[bytes], seal: Seal | None = None) -> bytes:
        """The 4 KiB header over one entry a layer."""
        fixed = self._fixed(PLAIN) if seal is None else self._fixed(SEALED) + seal.key_id + seal.salt
        body = (fixed + b"".join(entries)).ljust(ALIGNMENT - CHECKSUM_BYTES, b"\0")
        return body + xxh3_128_digest(body)

    def decode_header(self, header: bytes) -> "Header":
        """Raises KVCorrupt if `header` is damaged or another block's."""
        if len(header) != ALIGNMENT:
            raise KVCorrupt(f"header has {len(header)} bytes, expected {ALIGNMENT}")
        body, checksum = header[:-CHECKSUM_BYTES], header[-CHECKSUM_BYTES:]
        if xxh3_128_digest(body) != checksum:
            raise KVCorrupt("header does not match its checksum")
        fixed, rest = body[: _FIXED.size], body[_FIXED.size :]
        if fixed == self._fixed(PLAIN):
            return Header(None, self._entries(rest, CHECKSUM_BYTES))
        if fixed == self._fixed(SEALED):
            key_id, salt = rest[:KEY_ID_BYTES], rest[KEY_ID_BYTES : KEY_ID_BYTES + SALT_BYTES]
            return Header(
                Seal(key_id, salt), self._entries(rest[KEY_ID_BYTES + SALT_BYTES :], CHECKSUM_BYTES + TAG_BYTES)
            )
        raise KVCorrupt(f"header is of another block: {_describe(body)}, expected {_describe(self._fixed(PLAIN))}")

    def _entries(self, table: bytes, size: int) -> list[bytes]:
        return [table[i : i + size] for i in range(0, len(self.layers) * size, size)]

    def _fixed(self, version: int) -> bytes:
        return _FIXED.pack(
            MAGIC,
            version,
            ALIGNMENT,
            self.start,
            self.end,
            self.layers.start,
            len(self.layers),
            self.layout.bytes_per_token,
            bytes.fromhex(self.key),
        )


@dataclass(frozen=True)
class Header:
    seal: Seal | None
    entries: list[bytes]  # one a layer: checksum of what is stored, and the tag where it is sealed


def _describe(body: bytes) -> str:
    magic, version, _, start, end, first, count, per_token, key = _FIXED.unpack_from(body)
    where = f"{key.hex()[:12]} tokens {start}-{end} layers {first}+{count}"
    return f"{magic!r} v{version} {where} of {per_token} bytes a token"


class GroupFileReader:
    """Reads one group file; the header is checked when it is opened, each layer when it is read.

    What lies in the page cache is taken from there; the rest comes with O_DIRECT, which spares the processor a copy
    and other files their place in the cache, where the buffer is aligned and has room for the layer's padding.
    """

    def __init__(self, path: Path, block: GroupFile, keyring: Keyring | None = None) -> None:
        """Raises KVCorrupt, OSError."""
        self._block, self._keyring = block, keyring
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _LINUX:  # nothing ahead of what is asked for: most of it will not come through the page cache
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
            size = os.fstat(self._fd).st_size
            if size != block.size_bytes:
                raise KVCorrupt(f"file has {size} bytes, expected {block.size_bytes}")
            self._header = block.decode_header(os.pread(self._fd, ALIGNMENT, 0))
        except BaseException:
            os.close(self._fd)
            raise

    def read_into(self, layer: int, buffer: memoryview) -> None:
        """Fill `buffer` with one layer, checked and opened: [layer_bytes] bytes, or aligned and padded to whole pages.

        Raises KVCorrupt, OSError.
        """
        self._fill(layer, buffer)
        buffer = buffer[: self._block.layer_bytes]
        opened = self._block.decode_layer(layer, buffer, self._header, self._keyring)
        if opened is not None:
            buffer[:] = opened

    def check(self) -> None:
        """Read and check every layer, without opening what is sealed. Raises KVCorrupt, OSError."""
        buffer = memoryview(bytearray(self._block.layer_bytes))
        for layer in self._block.layers:
            self._fill(layer, buffer)
            self._block.check_layer(layer, buffer, self._header)

    def close(self) -> None:
        os.close(self._fd)

    def _fill(self, layer: int, buffer: memoryview) -> None:
        offset, done = self._block.offset(layer), 0
        padded = _LINUX and len(buffer) % ALIGNMENT == 0
        direct = padded and not self._is_cached(layer) and self._set_direct(True)
        while done < self._block.layer_bytes:
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                direct = self._set_direct(False)  # behind a short read, or on a file system that can't
                continue
            if count == 0:
                raise KVCorrupt(f"file ends inside layer {layer}")
            done += count
        if direct:
            self._set_direct(False)

    def _is_cached(self, layer: int) -> bool:
        """Whether the layer seems to lie in the page cache: its first, middle and last page do."""
        page, whole = memoryview(bytearray(ALIGNMENT)), aligned(self._block.layer_bytes)
        for place in {0, whole // 2 // ALIGNMENT * ALIGNMENT, whole - ALIGNMENT}:
            try:
                os.preadv(self._fd, [page], self._block.offset(layer) + place, os.RWF_NOWAIT)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS):
                    return False
                raise
        return True

    def _set_direct(self, direct: bool) -> bool:
        """Whether the file is read past the page cache from now on, as asked for."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return direct
