"""Prefixes that stay on the device for the next answer: the least recently used goes when another needs the room."""

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

from engine.interfaces import KVStore
from engine.prefix_kv import Prefix

if TYPE_CHECKING:
    from engine.cuda.prefix import DevicePrefix

# Left to prefills and answers on the device.
_RESERVED_SHARE = 0.3


class DeviceKV:
    """By the last segment's key. On a CPU nothing stays: the store's host tier is the same memory."""

    def __init__(self, device: torch.device, store: KVStore) -> None:
        self._device, self._store = device, store
        self._idle: OrderedDict[str, DevicePrefix] = OrderedDict()

    def put(self, key: str, prefix: Prefix) -> None:
        """Keep a prefix that no answer holds any more, if it is whole and on the device; close it otherwise."""
        if self._device.type == "cuda":
            from engine.cuda.prefix import DevicePrefix

            if isinstance(prefix, DevicePrefix) and prefix.loaded and not prefix.lost:
                prefix.stay()
                self._idle[key] = prefix
                return
        prefix.close()

    def take(self, key: str) -> Prefix | None:
        return self._idle.pop(key, None)

    def drop_unstored(self) -> None:
        """Let go of what the store no longer has: its document may have been deleted."""
        for key, prefix in list(self._idle.items()):
            if self._store.match(prefix.chain) < len(prefix.chain):
                self._idle.pop(key).close()

    def make_room(self, size_bytes: int) -> bool:
        """Whether `size_bytes` fit the device beside its other work, once idle prefixes have made way."""
        while not self._fits(size_bytes):
            if not self._idle:
                return False
            self._idle.popitem(last=False)[1].close()
            torch.cuda.empty_cache()
        return True

    def _fits(self, size_bytes: int) -> bool:
        free, total = torch.cuda.mem_get_info(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        cached = torch.cuda.memory_reserved(self._device) - allocated
        allowed = torch.cuda.get_per_process_memory_fraction(self._device) * total
        room = min(free + cached, allowed - allocated)
        return size_bytes <= room - _RESERVED_SHARE * min(total, allowed)
