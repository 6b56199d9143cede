"""The host-memory tier: verified layers of segments, least recently used out first, capped by bytes."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from engine.kv_store.counters import Counters


@dataclass
class _Entry:
    data: memoryview  # read-only
    reader: int  # who used it last


class HostCache:
    """Maps (name of a copy, layer) to its bytes; these never change, so an entry is checked once, when it comes in."""

    def __init__(self, cap_bytes: int, counters: Counters) -> None:
        self._cap_bytes, self._counters = cap_bytes, counters
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, int], _Entry] = OrderedDict()
        self._used_bytes = 0

    def get(self, name: str, layer: int, reader: int) -> memoryview | None:
        with self._lock:
            entry = self._entries.get((name, layer))
            if entry is None:
                return None
            entry.reader = reader
            self._entries.move_to_end((name, layer))
            return entry.data

    def put(self, name: str, layer: int, data: memoryview, reader: int) -> None:
        """Keep verified `data`, unless that would push out what the same reader has used.

        A prefix larger than the cap is read from end to end each time: keeping its beginning serves the next reader,
        while plain LRU would push out every layer just before it is wanted again.
        """
        with self._lock:
            if (name, layer) in self._entries or data.nbytes > self._cap_bytes:
                return
            evicted = 0
            while self._used_bytes + data.nbytes > self._cap_bytes:
                key, oldest = next(iter(self._entries.items()))
                if oldest.reader == reader:
                    break
                self._remove(key)
                evicted += 1
            else:
                self._entries[name, layer] = _Entry(data.toreadonly(), reader)
                self._used_bytes += data.nbytes
        if evicted:
            self._counters.add("evictions", "host", "capacity", amount=evicted)

    def drop(self, names: set[str]) -> None:
        """Forget copies that are gone from the index."""
        with self._lock:
            for key in [key for key in self._entries if key[0] in names]:
                self._remove(key)

    def holds(self, name: str, num_layers: int) -> bool:
        """Whether every layer of a copy is here."""
        with self._lock:
            return all((name, layer) in self._entries for layer in range(num_layers))

    def bytes_by_copy(self) -> dict[str, int]:
        with self._lock:
            sizes: dict[str, int] = {}
            for (name, _), entry in self._entries.items():
                sizes[name] = sizes.get(name, 0) + entry.data.nbytes
            return sizes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def _remove(self, key: tuple[str, int]) -> None:
        self._used_bytes -= self._entries.pop(key).data.nbytes
