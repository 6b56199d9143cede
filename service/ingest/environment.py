"""What a child process gets to see of the environment."""

import os
from pathlib import Path


def child_environment(scratch: Path) -> dict[str, str]:
    """What a child gets to see of the environment: no secrets of ours, its own home and temporary folder."""
    root = Path(__file__).resolve().parents[2]
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": str(root),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "LANG": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_THREAD_LIMIT": "1",
    }
