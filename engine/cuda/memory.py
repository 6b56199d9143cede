"""Pinned memory, streams and events."""

import weakref

import numpy as np
import torch
from numpy.typing import NDArray

_PAGE = 4096


def pinned_memory(size_bytes: int) -> NDArray[np.uint8]:
    """[size_bytes] uint8, page-locked: what a KV store on a GPU's machine reads into.

    Registered with the driver, not taken from PyTorch's allocator, which rounds up to a power of two. Whole pages of
    its own: the driver may refuse a page that a neighbour has registered already. Where it refuses all the same, it
    stays ordinary memory: slower to copy, nothing else.
    """
    whole_pages = -(-size_bytes // _PAGE) * _PAGE
    room = np.empty(whole_pages + _PAGE, np.uint8)
    first = -room.ctypes.data % _PAGE
    memory = room[first : first + size_bytes]
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    if size_bytes == 0 or int(runtime.cudaHostRegister(address, whole_pages, 0)) != 0:
        return memory
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
