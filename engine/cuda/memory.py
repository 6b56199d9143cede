"""Pinned memory, streams and events."""

import numpy as np
import torch
from numpy.typing import NDArray


def pinned_memory(size_bytes: int) -> NDArray[np.uint8]:
    """[size_bytes] uint8, page-locked: what a KV store on a GPU's machine reads into."""
    memory: NDArray[np.uint8] = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
