"""Counts of what the store did, for whoever exports metrics."""

import threading
from collections.abc import Callable, Mapping

# name → its labels, in order
NAMES: Mapping[str, tuple[str, ...]] = {
    "checksum_failures": (),
    "key_misses": (),  # blocks encrypted with a key that is not here
    "read_errors": (),  # blocks lost to an I/O error or a missing file
    "write_errors": (),  # writings and removals that the disk refused
    "index_errors": (),  # transactions and looks that the disk failed
    "dead_sessions": (),  # processes that ended without a word; what they left is settled
    "evictions": ("tier", "reason"),  # segments on disk, layers of a segment in host memory
    "hits": ("tier",),  # segments read, by the slowest tier they needed
    "misses": (),  # chains that could not be opened
    "read_bytes": ("tier",),
    "written_bytes": (),
    "decisions": ("decision",),  # loaded_shared, shared_too_slow: what a shared tier had, and whether it was used
    "shared_errors": ("tier",),  # uses of a shared tier that failed; it is left alone for a while
    "resumed_bytes": (),  # published by an earlier attempt and taken up
    "duplicate_segments": (),  # written by two writers at once, kept once
}

OnCount = Callable[[str, tuple[str, ...], int], None]


class Counters:
    """Counts by (name, label values…). `on_count(name, labels, amount)` is called behind every change, if given."""

    def __init__(self, on_count: OnCount | None = None) -> None:
        self._on_count = on_count
        self._lock = threading.Lock()
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, name: str, *labels: str, amount: int = 1) -> None:
        if len(labels) != len(NAMES[name]):
            raise ValueError(f"{name} got labels {labels}, expected {NAMES[name]}")
        with self._lock:
            key = (name, *labels)
            self._values[key] = self._values.get(key, 0) + amount
        if self._on_count is not None:
            self._on_count(name, labels, amount)

    def get(self, name: str, *labels: str) -> int:
        """One value, or with fewer labels the sum over the others."""
        key = (name, *labels)
        with self._lock:
            return sum(value for name, value in self._values.items() if name[: len(key)] == key)

    def snapshot(self) -> dict[tuple[str, ...], int]:
        with self._lock:
            return dict(self._values)
