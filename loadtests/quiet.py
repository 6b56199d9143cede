"""Waiting for a machine that has nothing else to do, before something is measured on it."""

import os
import sys
import time

LOAD = 0.7
PATIENCE_S = 600.0


def wait_until_quiet(patience_s: float = PATIENCE_S) -> float:
    """The load of the last minute, as soon as it is low or patience is over: an entry keeps it."""
    deadline = time.monotonic() + patience_s
    while (load := os.getloadavg()[0]) >= LOAD and time.monotonic() < deadline:
        time.sleep(5.0)
    if load >= LOAD:
        print(f"the machine is not quiet (load {load:.2f}): measured all the same", file=sys.stderr, flush=True)
    return load
