"""Threads for many small independent pieces of work on the CPU.

PyTorch's own threads split one operation and wait for each other at its end; pieces of a millisecond with Python
between them spend much of their time there. Here each thread takes whole pieces, one operation at a time on one core.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier

import torch


def run_all(jobs: Iterable[Callable[[], None]]) -> None:
    """Run every job, on as many threads as the caller's PyTorch would use. Raises the first job's error."""
    threads = torch.get_num_threads()
    if threads == 1:
        for job in jobs:
            job()
        return
    inference = torch.is_inference_mode_enabled()

    def one(job: Callable[[], None]) -> None:
        with torch.inference_mode(inference):
            job()

    for _ in _pool(threads).map(one, jobs):
        pass


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="cpu-kernel")
    ready = Barrier(threads)

    def prepare() -> None:
        torch.set_num_threads(1)
        ready.wait()  # so that each thread runs it once

    for started in [pool.submit(prepare) for _ in range(threads)]:
        started.result()
    # The setting holds for the thread that makes it, but is also what threads not yet started will find.
    torch.set_num_threads(threads)
    return pool
