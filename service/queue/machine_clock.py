"""Time that no one can set: seconds since the machine booted, the same for its processes; and which boot it was."""

import time
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def uptime_s() -> float:
    """Linux counts it from the boot for every process alike, and stops while the machine sleeps: so do its workers."""
    return time.monotonic()


@cache
def boot_id() -> str:
    """Another one after each boot: whatever held a lease before it is gone. Empty where the system has none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
