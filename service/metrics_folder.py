"""The folder that all processes of one server count into, set before prometheus-client is imported."""

import os
import shutil
from pathlib import Path

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def begin_metrics(data_dir: Path) -> None:
    """For the server: an empty folder. The counts of an earlier server end with it."""
    shutil.rmtree(_folder(data_dir), ignore_errors=True)
    join_metrics(data_dir)


def join_metrics(data_dir: Path) -> None:
    """For a worker that was started by hand: what it counts shows up in the server's scrapes."""
    _folder(data_dir).mkdir(parents=True, exist_ok=True)
    os.environ[VARIABLE] = str(_folder(data_dir))


def _folder(data_dir: Path) -> Path:
    return data_dir / "metrics"
