"""Pinned memory, streams and events."""

import weakref

import numpy as np
import torch
from numpy.typing import NDArray


def pinned_memory(size_bytes: int) -> NDArray[np.uint8]:
    """[size_bytes] uint8, page-locked: what a KV store on a GPU's machine reads into.

    Registered with the driver, not taken from PyTorch's allocator, which rounds up to a power of two. Where the
    driver refuses, it stays ordinary memory: slower to copy, nothing else.
    """
    memory = np.empty(max(size_bytes, 1), np.uint8)[:size_bytes]
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    if size_bytes == 0 or int(runtime.cudaHostRegister(address, size_bytes, 0)) != 0:
        return memory
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
