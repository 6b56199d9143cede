"""Locks between processes of one machine: files under flock, which the kernel frees when their holder dies."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType


class AlreadyLocked(Exception):
    """Another process holds the lock; `holder` is its process id where the file names one."""

    code = "data_dir_locked"

    def __init__(self, path: Path, holder: int | None) -> None:
        who = f"process {holder}" if holder is not None else "another process"
        super().__init__(f"{path} is held by {who}")
        self.path, self.holder = path, holder


class PidLock:
    """One process at a time. The file stays behind and names the last holder; only the flock on it counts."""

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises AlreadyLocked."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+", encoding="ascii")  # noqa: SIM115 (held until close)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            text = self._file.read().strip()
            self._file.close()
            raise AlreadyLocked(path, int(text) if text.isdecimal() else None) from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "PidLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait for the lock on `path` and hold it for the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
