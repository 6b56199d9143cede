"""Resume points: the hidden states at a layer boundary, kept on disk so that a killed prefill can go on from there.

Stored KV of layers 0…i can't restart layer i + 1; its input, the hidden states, can. Each owner has one file with two
slots written in turn, each with a digest, so that a kill in the middle of a write leaves the other slot. There is no
fsync: the page cache survives kill -9, and after a power cut the digest tells. Written with pwrite and not through a
memory map, so that the pages don't count as this process's memory. A resume point is never needed for a right
result: whatever goes wrong here is logged and the prefill goes on without one.
"""

import fcntl
import json
import logging
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from blake3 import blake3
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

_PAGE = 4096
_HEADER = struct.Struct("<8s32sQqqQ16s")  # magic, key, bytes, layer, generation, size of the notes, digest
_MAGIC = b"FWRESUM2"
_NOTES_BYTES = 1 << 20
_PIECE = 32 << 20
_PROGRESS = struct.Struct("<qH")  # layers computed, size of the owner's name, which follows
_LAYERS = struct.Struct("<q")
_OWNER_BYTES = 1024
# As long as the KV store keeps what an unfinished writer left: one is of no use without the other.
IDLE_TTL_S = 6 * 3600.0


@dataclass(frozen=True)
class ResumePoint:
    """`layer` is the next one to compute; `hidden` its input as bytes; `notes` what the prefill had gathered."""

    layer: int
    hidden: Bytes
    notes: dict[str, Any]


class ResumeFolder:
    """All owners' resume files under one cap in bytes; work that nobody takes up again is forgotten after a time."""

    def __init__(self, folder: Path, *, cap_bytes: int, idle_ttl_s: float = IDLE_TTL_S) -> None:
        self._folder, self._cap, self._idle_ttl_s = folder, cap_bytes, idle_ttl_s
        self.sweep()

    def sweep(self) -> int:
        """Remove the files that no running prefill holds and nobody wrote to for the TTL. Returns the bytes freed."""
        before, freed = time.time() - self._idle_ttl_s, 0
        try:
            for file in self._folder.glob("*.resume"):
                if file.stat().st_mtime < before:
                    freed += _remove_idle(file)
        except OSError as error:
            log.warning("old resume points not removed: %s", error)
        return freed

    def unfinished(self) -> set[str]:
        """Owners whose work nobody is at."""
        return {owner for file in self._folder.glob("*.resume") if (owner := _idle_owner(file)) is not None}

    def discard(self, owner: str) -> int:
        """Remove what `owner` left, unless it is at work. Returns the bytes freed."""
        try:
            return _remove_idle(self._path(owner))
        except FileNotFoundError:
            return 0

    def open(self, owner: str, *, key: str, hidden_bytes: int) -> "ResumeFile | None":
        """The owner's file for the work `key` (the last segment's), or None where it may not or can't be had."""
        size = _file_bytes(hidden_bytes)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.sweep()
            path = self._path(owner)
            if not self._make_room(size, keep=path):
                log.warning("no resume points: they need %d bytes, the cap is %d", size, self._cap)
                return None
            return ResumeFile(path, owner=owner, key=key, hidden_bytes=hidden_bytes)
        except OSError as error:
            log.warning("no resume points: %s", error)
            return None

    def _path(self, owner: str) -> Path:
        return self._folder / f"{blake3(owner.encode()).hexdigest()[:32]}.resume"

    def _make_room(self, size: int, *, keep: Path) -> bool:
        """Remove files that no running prefill holds, the oldest first, until `size` fits under the cap."""
        files = sorted((f for f in self._folder.glob("*.resume") if f != keep), key=lambda f: f.stat().st_mtime)
        used = sum(file.stat().st_size for file in files)
        for file in files:
            if used + size <= self._cap:
                break
            used -= _remove_idle(file)
        return used + size <= self._cap


class ResumeFile:
    """One owner's two slots. Opening takes a lock that ends with the process."""

    def __init__(self, path: Path, *, owner: str, key: str, hidden_bytes: int) -> None:
        descriptor = _lock(path, create=True)
        if descriptor is None:
            raise BlockingIOError(f"{path} is held by another process")
        self._path, self._file = path, descriptor
        self._owner, self._key, self._bytes = owner.encode()[:_OWNER_BYTES], bytes.fromhex(key), hidden_bytes
        try:
            self._prepare()
        except OSError:
            self.close()
            raise

    def _prepare(self) -> None:
        """Keep what an earlier attempt at the same work left; drop anything else."""
        self._generation = max((header.generation for header in self._headers() if header), default=0)
        if not any(header and header.key == self._key and header.size == self._bytes for header in self._headers()):
            os.ftruncate(self._file, 0)
            self._generation = 0
        # Its full length from the start, so that the cap counts what is still to be written.
        os.ftruncate(self._file, _file_bytes(self._bytes))
        os.pwrite(self._file, _PROGRESS.pack(self.layers_computed, len(self._owner)) + self._owner, 0)

    @property
    def layers_computed(self) -> int:
        """Layers that an earlier attempt at this work had computed, whether or not it could keep them."""
        raw = os.pread(self._file, _LAYERS.size, 0)
        return int(_LAYERS.unpack(raw)[0]) if len(raw) == _LAYERS.size else 0

    def note_progress(self, layers: int) -> None:
        try:
            os.pwrite(self._file, _LAYERS.pack(layers), 0)
        except OSError as error:
            log.warning("resume progress not written: %s", error)

    def load(self, *, up_to: int) -> ResumePoint | None:
        """The furthest point whose layer is at most `up_to` and whose bytes match their digest."""
        found = [
            (header.layer, slot) for slot, header in enumerate(self._headers()) if header and header.layer <= up_to
        ]
        for layer, slot in sorted(found, reverse=True):
            point = self._read(slot, layer)
            if point is not None:
                return point
        return None

    def save(self, layer: int, hidden: Bytes, notes: dict[str, Any]) -> Iterator[None]:
        """Write a point into the older slot, in pieces. Stops quietly where the disk refuses."""
        encoded = json.dumps(notes).encode()
        if len(encoded) > _NOTES_BYTES:
            log.warning("no resume point: its notes of %d bytes are too long", len(encoded))
            return
        slot = (self._generation + 1) % 2
        base = _slot_start(slot, self._bytes)
        digest = xxhash.xxh3_128(encoded)
        try:
            os.pwrite(self._file, b"\0" * _HEADER.size, base)
            for first in range(0, self._bytes, _PIECE):
                piece = hidden[first : first + _PIECE]
                _write_all(self._file, piece, base + _PAGE + _NOTES_BYTES + first)
                digest.update(piece.data)
                yield
            os.pwrite(self._file, encoded, base + _PAGE)
            self._generation += 1
            fields = (_MAGIC, self._key, self._bytes, layer, self._generation, len(encoded), digest.digest())
            os.pwrite(self._file, _HEADER.pack(*fields), base)
        except OSError as error:
            log.warning("no resume point at layer %d: %s", layer, error)

    def close(self) -> None:
        """Let go of the file; what is in it stays for the owner's next attempt."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        self.close()

    def _headers(self) -> list["_SlotHeader | None"]:
        return [_SlotHeader.read(self._file, _slot_start(slot, self._bytes)) for slot in range(2)]

    def _read(self, slot: int, layer: int) -> ResumePoint | None:
        base = _slot_start(slot, self._bytes)
        header = _SlotHeader.read(self._file, base)
        if header is None or header.key != self._key or header.size != self._bytes:
            return None
        notes = os.pread(self._file, header.notes_size, base + _PAGE)
        hidden = np.empty(self._bytes, dtype=np.uint8)
        digest = xxhash.xxh3_128(notes)
        for first in range(0, self._bytes, _PIECE):
            piece = hidden[first : first + _PIECE]
            if os.preadv(self._file, [piece.data], base + _PAGE + _NOTES_BYTES + first) != len(piece):
                return None
            digest.update(piece.data)
        if digest.digest() != header.digest:
            log.warning("resume point at layer %d does not match its digest and is not used", layer)
            return None
        return ResumePoint(layer, hidden, json.loads(notes))


@dataclass(frozen=True)
class _SlotHeader:
    key: bytes
    size: int
    layer: int
    generation: int
    notes_size: int
    digest: bytes

    @classmethod
    def read(cls, file: int, base: int) -> "_SlotHeader | None":
        raw = os.pread(file, _HEADER.size, base)
        if len(raw) < _HEADER.size:
            return None
        magic, *fields = _HEADER.unpack(raw)
        return cls(*fields) if magic == _MAGIC else None


def _slot_start(slot: int, hidden_bytes: int) -> int:
    slot_bytes = _PAGE + _NOTES_BYTES + -(-hidden_bytes // _PAGE) * _PAGE
    return _PAGE + slot * slot_bytes


def _file_bytes(hidden_bytes: int) -> int:
    return _slot_start(2, hidden_bytes)


def _write_all(file: int, data: Bytes, offset: int) -> None:
    view = data.data
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _idle_owner(path: Path) -> str | None:
    """Whose file it is; None where somebody holds it, or it is gone or not yet written to."""
    try:
        held = _lock(path)
    except OSError:
        return None
    if held is None:
        return None
    try:
        page = os.pread(held, _PROGRESS.size + _OWNER_BYTES, 0)
    finally:
        os.close(held)
    if len(page) < _PROGRESS.size:
        return None
    size = int(_PROGRESS.unpack_from(page)[1])
    return page[_PROGRESS.size : _PROGRESS.size + size].decode(errors="replace") or None


def _remove_idle(path: Path) -> int:
    """Remove a file that nobody holds; the bytes freed."""
    held = _lock(path)
    if held is None:
        return 0
    try:
        size = os.fstat(held).st_size
        path.unlink(missing_ok=True)
    finally:
        os.close(held)
    return size


def _lock(path: Path, *, create: bool = False) -> int | None:
    """The file's descriptor with an exclusive lock, or None where another process has it."""
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
