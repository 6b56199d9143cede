"""Which processes are alive: each open store holds a lock on a file of its own, which the kernel drops with it.

A lock rather than a process id and start time: it also tells right between containers that share the folder but not
their process ids, and for zombies.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Session:
    """One open store's sign of life."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            self.id = secrets.token_hex(8)
            self._path = _path(folder, self.id)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if self._path.exists():  # else a sweep found it before it was locked, and took it for dead
                return
            os.close(self._fd)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def is_alive(folder: Path, session: str) -> bool:
    """Whether the process that opened `session` still holds it."""
    with _dead(_path(folder, session)) as dead:
        return not dead


def remove_dead_files(folder: Path) -> None:
    """Remove the files of sessions whose process is gone."""
    for path in folder.glob("*.session"):
        with _dead(path) as dead:
            if dead:
                path.unlink(missing_ok=True)


@contextmanager
def _dead(path: Path) -> Iterator[bool]:
    """Whether nobody holds the lock; while the block runs nobody can take it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        dead = True
    except BlockingIOError:
        dead = False
    try:
        yield dead
    finally:
        os.close(fd)


def _path(folder: Path, session: str) -> Path:
    return folder / f"{session}.session"
