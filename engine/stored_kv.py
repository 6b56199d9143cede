"""The store's read-only buffers as tensors. Torch has no notion of read-only memory: nobody writes to these."""

import warnings

import torch


def as_tensor(buffer: memoryview) -> torch.Tensor:
    """[bytes] uint8 over the buffer's own memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=torch.uint8)
