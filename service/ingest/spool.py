"""Where the bytes of a document's files lie while it is read: hashed once, sniffed once, kept on disk only as needed.

Text goes into one pack file (a repository has thousands of small files), documents for the parsers get a file each,
and what can't be read is hashed and let go.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from service.ingest.base import MIB, IngestError
from service.ingest.sniff import Format, sniff

BLOCK = 256 * 1024
Warning = dict[str, Any]


class ByteStream(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass
class Entry:
    """One file, link or gap of the input. `reason` says why it is left out; None: it is to be read."""

    path: str  # unique, safe to print
    sort_key: tuple[Any, ...] = ()
    size: int = 0
    digest: str = ""  # blake3 of the bytes
    format: Format = "binary"
    offset: int = -1  # in the pack
    file: Path | None = None  # or a file of its own
    reason: str | None = None
    detail: str | None = None  # a link's target, a submodule's commit, a parser's message
    warnings: list[Warning] = field(default_factory=list)
    tracked: bool = False  # known to git's index: ignore rules don't apply
    rendered: bool = False  # the spool holds the text that a mail was turned into
    rendered_size: int = 0

    def warn(self, code: str, **fields: Any) -> None:
        if not any(w["code"] == code for w in self.warnings):
            self.warnings.append({"code": code, **fields})


class Budget:
    """What all nesting levels together may unpack. Raises IngestError archive_bomb, too_many_entries."""

    # Deflate can't pass 1,032:1. Real text stays under 100:1 except in small files, hence the floor.
    MAX_RATIO = 200
    RATIO_FLOOR_BYTES = 64 * MIB

    def __init__(self, *, max_bytes: int, max_entries: int) -> None:
        self.max_bytes, self.max_entries = max_bytes, max_entries
        self.input_bytes = 0
        self.unpacked_bytes = 0
        self.entries = 0

    def add_bytes(self, count: int) -> None:
        self.unpacked_bytes += count
        if self.unpacked_bytes > self.max_bytes:
            raise IngestError("archive_bomb", f"unpacks to more than {self.max_bytes} bytes, the limit")
        if self.unpacked_bytes > max(self.RATIO_FLOOR_BYTES, self.MAX_RATIO * self.input_bytes):
            raise IngestError(
                "archive_bomb",
                f"{self.input_bytes} bytes unpack to more than {self.unpacked_bytes}: over {self.MAX_RATIO} to 1",
            )

    def add_entry(self, count: int = 1) -> None:
        self.entries += count
        if self.entries > self.max_entries:
            raise IngestError("too_many_entries", f"holds more than {self.max_entries} files, the limit")


class Spool:
    """Takes byte streams, gives them back as blocks. Everything lies under `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._pack = open(folder / "pack", "w+b", buffering=0)  # noqa: SIM115 (lives as long as the spool)
        self._pack_end = 0
        self._files = 0

    def close(self) -> None:
        self._pack.close()

    def new_file(self) -> Path:
        self._files += 1
        return self.folder / f"{self._files:06d}"

    def add(self, entry: Entry, stream: ByteStream, count: Callable[[int], None] | None = None) -> None:
        """Read `stream` to its end into the spool and fill in the entry's size, digest, format and place.

        `count` is told the bytes of each block and may raise; whatever is raised leaves nothing behind.
        """
        block = _read_full(stream, BLOCK)
        if count:
            count(len(block))
        entry.format = sniff(block, entry.path)
        sink = _Sink(self, entry)
        digest = blake3()
        try:
            while block:
                digest.update(block)
                sink.write(block)
                entry.size += len(block)
                block = stream.read(BLOCK)
                if count:
                    count(len(block))
        except BaseException:
            sink.abandon()
            raise
        sink.finish()
        entry.digest = digest.hexdigest()

    def add_bytes(self, entry: Entry, data: bytes) -> None:
        import io

        self.add(entry, io.BytesIO(data))

    def blocks(self, entry: Entry) -> Iterator[bytes]:
        """The entry's bytes again, in blocks."""
        if entry.file is not None:
            with open(entry.file, "rb") as file:
                while block := file.read(BLOCK):
                    yield block
            return
        at = entry.offset
        end = at + (entry.rendered_size if entry.rendered else entry.size)
        while at < end:
            block = os.pread(self._pack.fileno(), min(BLOCK, end - at), at)
            if not block:
                raise OSError(f"the pack ends at {at}, expected {end}")
            at += len(block)
            yield block

    def read(self, entry: Entry, limit: int) -> bytes:
        """At most the first `limit` bytes."""
        out = b""
        for block in self.blocks(entry):
            out += block
            if len(out) >= limit:
                break
        return out[:limit]


class _Sink:
    """One entry's way into the pack, a file of its own, or nowhere."""

    def __init__(self, spool: Spool, entry: Entry) -> None:
        self.spool, self.entry = spool, entry
        self.file = None
        if entry.format == "text":
            entry.offset = spool._pack_end
        elif entry.format not in ("binary", "empty"):
            entry.file = spool.new_file()
            self.file = open(entry.file, "wb")  # noqa: SIM115 (closed by finish or abandon)

    def write(self, block: bytes) -> None:
        if self.file is not None:
            self.file.write(block)
        elif self.entry.format == "text":
            view = memoryview(block)
            at = self.spool._pack_end
            while view:
                written = os.pwrite(self.spool._pack.fileno(), view, at)
                at, view = at + written, view[written:]
            self.spool._pack_end = at

    def finish(self) -> None:
        if self.file is not None:
            self.file.close()

    def abandon(self) -> None:
        if self.file is not None:
            self.file.close()
            assert self.entry.file is not None
            self.entry.file.unlink(missing_ok=True)
            self.entry.file = None
        elif self.entry.format == "text":
            self.spool._pack_end = self.entry.offset
            self.entry.offset = -1


def _read_full(stream: ByteStream, size: int) -> bytes:
    """Like read, but short only at the end: pipes and decompressors return what they have."""
    parts: list[bytes] = []
    while size > 0 and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
