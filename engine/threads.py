"""How idle OpenMP threads wait. Torch-free: the environment is read when torch loads its runtime."""

import os

# libgomp lets idle threads spin for milliseconds. Where another process wants the cores they spin against it, and a
# two-thread prefill beside one busy process became six times slower; with a short spin it keeps its share.
_WAITING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}


def share_cores() -> None:
    """Let this process's idle threads (and its children's) sleep soon. Call it before torch is imported."""
    for name, value in _WAITING.items():
        os.environ.setdefault(name, value)
