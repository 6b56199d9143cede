"""What a disk gives without anything in between: O_DIRECT reading of given files, by several threads."""

import errno
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_PIECE_BYTES = 8 << 20
_THREADS = (2, 4, 8)


@dataclass(frozen=True)
class RawRate:
    bytes_per_s: float
    threads: int  # with which it was reached


def raw_read_rate(files: Sequence[Path], *, most_bytes: int) -> RawRate | None:
    """The best rate of 2, 4 and 8 threads, each over files of its own third, `most_bytes` in all.

    None where the file system has no O_DIRECT. Raises ValueError for no files, OSError.
    """
    if not files:
        raise ValueError("got no files, expected at least one")
    try:
        os.close(os.open(files[0], os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    rates = []
    for turn, threads in enumerate(_THREADS):
        chosen, size = [], 0
        for file in files[turn :: len(_THREADS)] or files:
            chosen.append(file)
            size += file.stat().st_size
            if size >= most_bytes / len(_THREADS):
                break
        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            read = sum(pool.map(_read, chosen))
        rates.append(RawRate(read / (time.perf_counter() - started), threads))
    return max(rates, key=lambda rate: rate.bytes_per_s)


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """What is written back already; dirty pages stay."""
    for file in files:
        with file.open("rb") as source:
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(file: Path) -> int:
    done = 0
    with mmap.mmap(-1, _PIECE_BYTES) as memory:  # page-aligned, as O_DIRECT wants it
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            while count := os.preadv(fd, [memory], done):
                done += count
        finally:
            os.close(fd)
    return done
