"""Reading leased segments layer by layer, the next layers on their way while the caller computes."""

import errno
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Literal

from engine.errors import KVCorrupt, KVMissing, KVSealed
from engine.interfaces import KVLayout
from engine.kv_store.blocks import BlockFolder
from engine.kv_store.buffers import BufferPool
from engine.kv_store.copies import Copy
from engine.kv_store.counters import Counters
from engine.kv_store.host_cache import HostCache
from engine.kv_store.layout import ALIGNMENT, aligned

log = logging.getLogger("foreword.kv_store")

_serials = itertools.count(1)
# What a process may run out of: says nothing about the stored bytes.
_NOT_THE_DATA = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})


@dataclass(frozen=True)
class ReadPath:
    """What every reader of a store shares."""

    blocks: BlockFolder
    host: HostCache
    buffers: BufferPool
    executor: Executor
    counters: Counters
    readahead_bytes: int


class LocalReader:
    """A `KVReader` over the host and disk tiers.

    Each block is read and checked by a thread of the store; `readahead_bytes` bounds what is fetched ahead, one layer
    at least. The buffers stay valid for as long as they are referenced, also after `close`.
    """

    def __init__(
        self,
        layout: KVLayout,
        copies: Sequence[Copy],
        path: ReadPath,
        *,
        condemn: Callable[[Copy, str], None],
        end_lease: Callable[[], None],
    ) -> None:
        self._layout, self._copies, self._path = layout, copies, path
        self._closed = self._read_any = False
        self._condemn, self._end_lease = condemn, end_lease
        self._serial = next(_serials)
        self._pending: dict[int, list[Future[memoryview]]] = {}
        per_layer = max(1, sum(copy.layer_bytes for copy in copies))
        # Two layers' buffers take turns: made anew for every layer they would cost more than reading.
        self._expected_bytes = 2 * sum(aligned(copy.layer_bytes) + ALIGNMENT for copy in copies)
        path.buffers.expect(self._expected_bytes)
        self._layers_ahead = max(1, path.readahead_bytes // per_layer)
        in_host = all(path.host.holds(copy.name, layout.num_layers) for copy in copies)
        self.tier: Literal["host", "disk", "shared"] = "host" if in_host else "disk"

    def read_layer(self, layer: int) -> Sequence[memoryview]:
        """One read-only buffer a segment, in chain order, checked. Raises KVMissing, OSError."""
        if self._closed:
            raise ValueError("the reader is closed")
        if not 0 <= layer < self._layout.num_layers:
            raise ValueError(f"got layer {layer}, expected 0 to {self._layout.num_layers - 1}")
        self._read_any = True
        last_ahead = min(layer + self._layers_ahead, self._layout.num_layers - 1)
        for stale in [other for other in self._pending if not layer <= other <= last_ahead]:
            _cancel(self._pending.pop(stale))
        for wanted in range(layer, last_ahead + 1):
            if wanted not in self._pending:
                self._pending[wanted] = [self._start(copy, wanted) for copy in self._copies]
        return [future.result() for future in self._pending.pop(layer)]

    def close(self) -> None:
        """End the lease; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for futures in self._pending.values():
            _cancel(futures)
        self._pending.clear()
        self._path.buffers.expect(-self._expected_bytes)
        if self._read_any:
            self._path.counters.add("hits", self.tier, amount=len(self._copies))
        self._end_lease()

    def _start(self, copy: Copy, layer: int) -> Future[memoryview]:
        held = self._path.host.get(copy.name, layer, self._serial)
        if held is None:
            return self._path.executor.submit(self._fetch, copy, layer)
        self._path.counters.add("read_bytes", "host", amount=held.nbytes)
        done: Future[memoryview] = Future()
        done.set_result(held)
        return done

    def _fetch(self, copy: Copy, layer: int) -> memoryview:
        self.tier = "disk"
        try:
            data = self._read(copy, layer)
        except KVSealed as error:
            self._path.counters.add("key_misses")
            self._condemn(copy, "sealed")
            raise _missing(copy, layer, error) from error
        except KVCorrupt as error:
            self._path.counters.add("checksum_failures")
            self._condemn(copy, "corrupt")
            raise _missing(copy, layer, error) from error
        except OSError as error:
            if error.errno in _NOT_THE_DATA:
                raise
            self._path.counters.add("read_errors")
            self._condemn(copy, "unreadable")
            raise _missing(copy, layer, error) from error
        self._path.counters.add("read_bytes", "disk", amount=data.nbytes)
        self._path.host.put(copy.name, layer, data, self._serial)
        return data

    def _read(self, copy: Copy, layer: int) -> memoryview:
        # The file is opened, and its 4 KiB header checked, for every layer: that costs microseconds and keeps the
        # number of open files small however long the chain is.
        file = self._path.blocks.open(copy, layer // copy.layout.layers_per_group)
        try:
            buffer = self._path.buffers.take_aligned(aligned(copy.layer_bytes), ALIGNMENT)
            file.read_into(layer, buffer)
        finally:
            file.close()
        return buffer[: copy.layer_bytes].toreadonly()


def _missing(copy: Copy, layer: int, error: Exception) -> KVMissing:
    message = f"segment {copy.key[:12]} (tokens {copy.start}-{copy.end}), layer {layer}: {error}"
    log.error("kv_store: not served: %s", message)
    return KVMissing(message)


def _cancel(futures: Sequence[Future[memoryview]]) -> None:
    """Let go of fetches that nobody waits for; those under way end on their own, into buffers nobody sees."""
    for future in futures:
        future.cancel()
