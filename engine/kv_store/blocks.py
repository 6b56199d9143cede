"""The folder that holds group files: names, writing, publishing, reading, removal. Knows nothing of who uses what.

A file is `<key>-<copy>-<group>.kv`; while it is written, `.tmp`.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.kv_store.copies import Copy
from engine.kv_store.group_file import GroupFileReader
from engine.kv_store.sealing import Keyring, Seal

_NAME = re.compile(r"(?P<key>[0-9a-f]{64})-(?P<copy>[0-9a-f]{16})-(?P<group>\d{3,})\.(?P<kind>kv|tmp)")


@dataclass(frozen=True)
class FoundFile:
    """What a folder entry's name and size say."""

    path: Path
    copy: str | None  # None: not one of ours
    key: str
    group: int
    published: bool
    size_bytes: int


class BlockFolder:
    """With `keyring` what is written is encrypted; without, what was encrypted can be checked, but not read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keyring: Keyring | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, copy: Copy, group: int) -> Path:
        return self.folder / f"{copy.key}-{copy.id}-{group:03d}.kv"

    def write(self, copy: Copy, group: int, offset: int, data: bytes | memoryview) -> None:
        """Write `data` at `offset` of the group's unpublished file, making it if needed. Raises OSError."""
        fd = os.open(self._temporary(copy, group), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, offset, data)
        finally:
            os.close(fd)

    def new_seal(self) -> Seal | None:
        """For one file that is to be written; None: it is not encrypted."""
        return None if self.keyring is None else self.keyring.new_seal()

    def publish(self, copy: Copy, group: int, entries: Sequence[bytes], seal: Seal | None) -> None:
        """Complete a group's file, make it durable and give it its name. `sync` makes the name durable."""
        block, temporary = copy.block(group), self._temporary(copy, group)
        fd = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, block.size_bytes)
            _write_all(fd, 0, block.encode_header(entries, seal))
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(self.path(copy, group))

    def sync(self) -> None:
        """Make all names in the folder durable."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def open(self, copy: Copy, group: int) -> GroupFileReader:
        """A published file, its header checked. Raises KVCorrupt, OSError."""
        return GroupFileReader(self.path(copy, group), copy.block(group), self.keyring)

    def check(self, copy: Copy, group: int) -> None:
        """Read and check a whole published file. Raises KVCorrupt, OSError."""
        file = self.open(copy, group)
        try:
            file.check()
        finally:
            file.close()

    def published_bytes(self, copy: Copy) -> int:
        """Bytes of the files that a copy has published."""
        paths = (self.path(copy, group) for group in range(copy.layout.num_groups))
        return sum(path.stat().st_size for path in paths if path.exists())

    def remove(self, copy: Copy, groups: Iterable[int] | None = None) -> None:
        """Remove a copy's files (None: of all groups), published or not; those that aren't there are no error."""
        groups = range(copy.layout.num_groups) if groups is None else groups
        for group in groups:
            self.remove_unpublished(copy, group)
            self.path(copy, group).unlink(missing_ok=True)

    def remove_unpublished(self, copy: Copy, group: int) -> None:
        self._temporary(copy, group).unlink(missing_ok=True)

    def scan(self) -> Iterator[FoundFile]:
        """Every file in the folder."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                try:
                    size_bytes = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:  # removed since it was listed
                    continue
                path, name = Path(entry.path), _NAME.fullmatch(entry.name)
                if name is None:
                    yield FoundFile(path, None, "", 0, False, size_bytes)
                else:
                    published = name["kind"] == "kv"
                    yield FoundFile(path, name["copy"], name["key"], int(name["group"]), published, size_bytes)

    def free_bytes(self) -> int:
        """Bytes that the file system still gives an unprivileged user."""
        stat = os.statvfs(self.folder)
        return stat.f_bavail * stat.f_frsize

    def _temporary(self, copy: Copy, group: int) -> Path:
        return self.path(copy, group).with_suffix(".tmp")


def _write_all(fd: int, offset: int, data: bytes | memoryview) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
