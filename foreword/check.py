"""`foreword check`: each kernel against its reference on this machine, the path it takes and why."""

import torch
from rich.console import Console
from rich.table import Table

from kernels import selftest


def check_command() -> int:
    """Exit status 1 where a fast path failed and another had to take its place."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    results = selftest.run(device)
    table = Table("operation", "path", "why", "failed paths", title=f"{name}, torch {torch.__version__}")
    for result in results:
        table.add_row(result.op, result.path, result.reason, "; ".join(f"{path}: {why}" for path, why in result.failed))
    Console().print(table)
    return int(any(result.failed for result in results))
