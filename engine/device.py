"""Which kind of device the engine takes, before it is opened."""

import torch


def device_type(name: str) -> str:
    """cpu or cuda, of a device's name: auto (a GPU where there is one), cpu, cuda or cuda:N."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name.partition(":")[0]
