"""The folder that holds group files: names, publishing, removal. Knows nothing of who uses what.

A file is `<key>-<copy>-<group>.kv`. A *copy* is one writer's set of files of one segment; its id is random and never
used again, so two writers of the same key never touch each other's files, and the index alone says which copy counts.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(?P<key>[0-9a-f]{64})-(?P<copy>[0-9a-f]{16})-(?P<group>\d{3,})\.(?P<kind>kv|tmp)")


@dataclass(frozen=True)
class StoredFile:
    """What a folder entry's name and size say."""

    path: Path
    copy: str | None  # None: not one of ours
    group: int
    published: bool
    size_bytes: int


class BlockFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, key: str, copy: str, group: int) -> Path:
        return self.folder / f"{key}-{copy}-{group:03d}.kv"

    def temporary(self, key: str, copy: str, group: int) -> Path:
        return self.path(key, copy, group).with_suffix(".tmp")

    def write(self, path: Path, offset: int, data: bytes) -> None:
        """Write `data` at `offset`, making the file if needed. Raises OSError."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, offset, data)
        finally:
            os.close(fd)

    def publish(self, temporary: Path, path: Path, header: bytes, size_bytes: int) -> None:
        """Complete a temporary file, make it durable and give it its name (`sync` makes the name durable)."""
        fd = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            _write_all(fd, 0, header)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(path)

    def sync(self) -> None:
        """Make all names in the folder durable."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, key: str, copy: str, groups: Iterable[int]) -> None:
        """Remove a copy's files, published or not; those that aren't there are no error."""
        for group in groups:
            self.temporary(key, copy, group).unlink(missing_ok=True)
            self.path(key, copy, group).unlink(missing_ok=True)

    def scan(self) -> Iterator[StoredFile]:
        """Every file in the folder."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                name = _NAME.fullmatch(entry.name)
                try:
                    size_bytes = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:  # removed since it was listed
                    continue
                if name is None:
                    yield StoredFile(Path(entry.path), None, 0, False, size_bytes)
                else:
                    published = name["kind"] == "kv"
                    yield StoredFile(Path(entry.path), name["copy"], int(name["group"]), published, size_bytes)

    def free_bytes(self) -> int:
        """Bytes that the file system still gives an unprivileged user."""
        stat = os.statvfs(self.folder)
        return stat.f_bavail * stat.f_frsize


def _write_all(fd: int, offset: int, data: bytes) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
