"""The folder that all processes of one machine count into, entered before prometheus-client is imported.

Each process writes files `<type>_<identity>.db` and holds `<identity>.lock` for as long as it lives. Files outlive a
kill -9 of their process; who finds a lock free knows that its owner is dead. An identity is the process id, or another
number where a process of another container, seen in the same folder, has that id.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
DEAD = "dead"  # in place of an identity: the counts of all dead processes

# Made in full beforehand: a mapped file with holes kills its writer (SIGBUS) when the disk is full.
_FILE_BYTES = 1 << 20
_FILES = ("counter", "histogram", "summary", "gauge_livemostrecent", "gauge_livesum")

_held: dict[Path, tuple[int, int]] = {}  # folder → this process's identity and its lock's descriptor


def begin_metrics(data_dir: Path) -> None:
    """For the server: the counts of earlier processes end with their server, those of living workers stay."""
    folder = _made(data_dir)
    for path in folder.glob("*.db"):
        owner = owner_of(path)
        if owner == DEAD or not is_alive(folder, owner):
            path.unlink(missing_ok=True)
    join_metrics(data_dir)


def join_metrics(data_dir: Path) -> None:
    """For a worker: what it counts shows up in the scrapes of the server on the same data folder."""
    enter(_made(data_dir))
    os.environ[VARIABLE] = str(_made(data_dir))


def enter(folder: Path) -> int:
    """This process's identity in `folder`, locked until it ends. The same at every call."""
    if folder not in _held:
        identity = os.getpid()
        while (lock := _try_lock(_lock_path(folder, str(identity)))) is None:
            identity += 1 << 22  # above every process id of Linux
        _held[folder] = (identity, lock)
        for kind in _FILES:
            path = folder / f"{kind}_{identity}.db"
            if kind.startswith("gauge"):
                path.unlink(missing_ok=True)  # of a dead process that had our id
            fill(path)
    return _held[folder][0]


def owner_of(path: Path) -> str:
    """The identity in the name of a file."""
    return path.stem.rpartition("_")[2]


def is_alive(folder: Path, identity: str) -> bool:
    """Whether its process lives (or this is it). The lock of a dead one is removed."""
    path = _lock_path(folder, identity)
    if not path.exists():
        return False
    lock = _try_lock(path)
    if lock is None:
        return True
    path.unlink(missing_ok=True)
    os.close(lock)
    return False


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """One scrape at a time, over all processes: dead ones' files are put together while nobody reads them."""
    descriptor = os.open(folder / "scrape.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _made(data_dir: Path) -> Path:
    folder = data_dir / "metrics"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _lock_path(folder: Path, identity: str) -> Path:
    return folder / f"{identity}.lock"


def _try_lock(path: Path) -> int | None:
    """The descriptor of a lock that is now ours; None where another holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        # Somebody may have removed the file between the two calls above: that lock would be nobody's.
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
        os.close(descriptor)


def fill(path: Path) -> None:
    """Raises OSError when the disk is full."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _FILE_BYTES)
    finally:
        os.close(descriptor)
