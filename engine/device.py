"""Which kind of device the engine takes, and what memory suits it, before it is opened."""

from collections.abc import Callable

import torch

from engine.kv_store.buffers import Bytes, plain_memory


def device_type(name: str) -> str:
    """cpu or cuda, of a device's name: auto (a GPU where there is one), cpu, cuda or cuda:N."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name.partition(":")[0]


def buffer_memory(name: str) -> Callable[[int], Bytes]:
    """What a KV store reads into for that device: page-locked memory where a GPU copies from it."""
    if device_type(name) != "cuda":
        return plain_memory
    from engine.cuda.memory import pinned_memory

    return pinned_memory
