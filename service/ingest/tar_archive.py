"""Reading tar archives as streams, compressed or not: no member touches the disk under its own name."""

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from service.ingest.base import IngestError
from service.ingest.names import display_name, split_path
from service.ingest.sniff import is_tar_header
from service.ingest.spool import BLOCK, Budget, ByteStream, Entry, Spool
from service.ingest.zip_archive import UNNAMED

CORRUPT = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError, ValueError)
COMPRESSION_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".z", ".lzma")


def open_compressed(path: Path) -> IO[bytes]:
    """The decompressed stream of a gzip, bzip2, xz or zstd file, told by its magic number."""
    with open(path, "rb") as file:
        head = file.read(6)
    stream: Any
    if head.startswith(b"\x1f\x8b"):
        stream = gzip.open(path, "rb")  # noqa: SIM115 (the caller closes it)
    elif head.startswith(b"BZh"):
        stream = bz2.open(path, "rb")  # noqa: SIM115
    elif head.startswith(b"\xfd7zXZ"):
        stream = lzma.open(path, "rb")  # noqa: SIM115
    else:
        stream = _open_zstd(path)
    opened: IO[bytes] = stream
    return opened


def _open_zstd(path: Path) -> Any:
    import zstandard

    reader: Any = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
        open(path, "rb"),  # noqa: SIM115 (closed with the reader)
        read_across_frames=True,
        closefd=True,
    )
    return io.BufferedReader(reader)


def inner_name(name: str) -> str:
    """`notes.txt.gz` → `notes.txt`, `x.tgz` → `x.tar`."""
    lower = name.lower()
    if lower.endswith((".tgz", ".tbz2", ".txz", ".tzst")):
        return name[: name.rindex(".")] + ".tar"
    for suffix in COMPRESSION_SUFFIXES:
        if lower.endswith(suffix):
            return name[: -len(suffix)] or name
    return name


class WatchedStream:
    """Counts what passes, gives back its first block once more, and remembers where the last non-zero byte stood."""

    def __init__(self, stream: ByteStream, budget: Budget | None) -> None:
        self._stream, self._budget = stream, budget
        self.position = 0
        self.last_nonzero = -1
        self.head = self._fetch(BLOCK)
        self._pending = self.head

    def _fetch(self, size: int) -> bytes:
        data = self._stream.read(size)
        if self._budget:
            self._budget.add_bytes(len(data))
        stripped = len(data.rstrip(b"\0"))
        if stripped:
            self.last_nonzero = self.position + stripped - 1
        self.position += len(data)
        return data

    def read(self, size: int = BLOCK) -> bytes:
        if self._pending:
            data, self._pending = self._pending[:size], self._pending[size:]
            return data
        return self._fetch(size)


def read_compressed(path: Path, name: str, spool: Spool, budget: Budget) -> Iterator[tuple[list[str], Entry]]:
    """Members of a compressed tar, or the single file that a compressed file holds."""
    try:
        with open_compressed(path) as raw:
            stream = WatchedStream(raw, budget)
            if is_tar_header(stream.head):
                yield from read_tar(stream, spool, budget)
                return
            budget.add_entry()
            inside = inner_name(name.rsplit("/", 1)[-1])
            entry = Entry(path=inside)
            spool.add(entry, stream)
            yield [inside], entry
    except CORRUPT as error:
        raise _corrupt(error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] == "zstandard":
            raise _corrupt(error) from error
        raise


def read_plain_tar(path: Path, spool: Spool, budget: Budget) -> Iterator[tuple[list[str], Entry]]:
    try:
        with open(path, "rb") as raw:
            yield from read_tar(WatchedStream(raw, budget), spool, budget)
    except CORRUPT as error:
        raise _corrupt(error) from error


def _corrupt(error: Exception) -> IngestError:
    return IngestError("archive_corrupt", f"the archive is cut off or damaged: {error}")


def read_tar(stream: WatchedStream, spool: Spool, budget: Budget) -> Iterator[tuple[list[str], Entry]]:
    """(path parts, entry) of each member of an uncompressed tar stream. Bytes are counted by the stream.

    Raises IngestError archive_corrupt also where tarfile would stop in silence: at a damaged header and at a
    missing end mark.
    """
    by_name: dict[str, Entry] = {}
    with tarfile.open(fileobj=stream, mode="r|", errorlevel=2) as archive:  # type: ignore[call-overload]
        for member in archive:
            parts = split_path(member.name)
            if member.isdir():
                if parts:
                    yield parts, Entry(path="", reason="directory")
                continue
            parts = parts or [UNNAMED]
            budget.add_entry()
            entry = _read_member(archive, member, spool, budget, by_name)
            by_name["/".join(parts)] = entry
            yield parts, entry
            archive.members = []  # or it keeps every header
        stopped = archive.offset
    while stream.read(BLOCK):
        pass
    if stream.last_nonzero >= stopped:
        raise IngestError("archive_corrupt", f"the tar has a damaged header at byte {stopped}")
    if stream.position <= stopped:
        raise IngestError("archive_corrupt", "the tar ends without its end mark: it is cut off")


def _read_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, spool: Spool, budget: Budget, by_name: dict[str, Entry]
) -> Entry:
    entry = Entry(path=member.name)
    if member.issym():
        entry.reason, entry.detail = "symlink", member.linkname
    elif member.islnk():
        _copy_hard_link(entry, member, by_name)
    elif member.isreg():
        data = archive.extractfile(member)
        assert data is not None
        if member.issparse():
            # The holes of a sparse file cost nothing in the stream, but they do in the spool.
            spool.add(entry, data, budget.add_bytes)
        else:
            spool.add(entry, data)
        if entry.size != member.size:
            raise IngestError("archive_corrupt", f"{display_name(member.name)!r} is cut off at {entry.size} bytes")
    else:
        entry.reason = "special_file"
    return entry


def _copy_hard_link(entry: Entry, member: tarfile.TarInfo, by_name: dict[str, Entry]) -> None:
    """A hard link inside the archive is the file it names; one that names anything else is never opened."""
    try:
        target = by_name.get("/".join(split_path(member.linkname)))
    except IngestError:
        target = None
    if target is None or target.reason is not None:
        entry.reason, entry.detail = "link_target_missing", member.linkname
        return
    entry.size, entry.digest, entry.format = target.size, target.digest, target.format
    entry.offset, entry.file = target.offset, target.file
