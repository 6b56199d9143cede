"""How idle OpenMP threads wait, and what memory a process keeps. Torch-free.

The environment is read when torch loads its OpenMP runtime.
"""

import ctypes
import os

# libgomp lets idle threads spin for milliseconds. Where another process wants the cores they spin against it, and a
# two-thread prefill beside one busy process became six times slower; with a short spin it keeps its share.
_WAITING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
# oneDNN and PyTorch's layer over it keep what they compiled for each shape, 1,024 shapes of about a megabyte: questions
# of every length would grow a worker by a gigabyte.
_FEW_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}


def share_cores() -> None:
    """Let this process's idle threads (and its children's) sleep soon, and keep what is compiled for each shape small.

    Call it before torch is imported.
    """
    for name, value in (_WAITING | _FEW_SHAPES).items():
        os.environ.setdefault(name, value)


# glibc's mallopt parameters (malloc.h) and values, in bytes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = {_M_TRIM_THRESHOLD: 1 << 30, _M_MMAP_THRESHOLD: 32 << 20}


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next allocation. Elsewhere nothing happens.

    A prefill frees and allocates the same megabytes thousands of times; given back to the kernel in between, they are
    mapped and zeroed anew each time: 5 % of the run.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, size in _KEPT.items():
            mallopt(parameter, size)


def release_freed_memory() -> None:
    """Give what malloc keeps back to the kernel: between prefills, where nothing will use it at once.

    What documents and questions of all lengths leave behind is free but in pieces; kept for ever it looks like a leak,
    and other processes can't have it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
