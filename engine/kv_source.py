"""Where an answer's KV comes from: the store, or computing its first tokens again while the store gives the rest."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol

import torch

from engine.chain import Segment, TokenIds
from engine.device import buffer_memory
from engine.errors import OutOfMemory
from engine.interfaces import KVLayout, KVReader, KVStore
from engine.kv_plan import KVPlanner
from engine.kv_store.buffers import BufferPool
from engine.prefill_rows import PrefillRows
from engine.sparse.settings import SparseSettings

log = logging.getLogger(__name__)

OpenRows = Callable[[Sequence[Segment]], PrefillRows]
# Loading that turns out so much faster than computing takes over.
_FASTER = 1.3


class OpensReaders(Protocol):
    """What a `Prefix` needs of its KV's source."""

    def open_reader(self, chain: Sequence[Segment]) -> KVReader: ...

    @property
    def computed_tokens(self) -> int:
        """Of the prefix: computed again for this answer. May fall to 0 while layers are read."""
        ...


class KVSource:
    """Of one prefix. `open_rows` gives what computes leading segments (first argument), `tokens` are the prefix's."""

    def __init__(
        self,
        store: KVStore,
        planner: KVPlanner,
        tokens: TokenIds,
        settings: SparseSettings,
        open_rows: OpenRows,
        device: torch.device,
    ) -> None:
        self._store, self._planner, self._tokens = store, planner, tokens
        self._settings, self._open_rows, self._device = settings, open_rows, device
        self._reader: _TimedReader | SplitReader | None = None

    @property
    def computed_tokens(self) -> int:
        return 0 if self._reader is None else self._reader.computed_tokens

    def open_reader(self, chain: Sequence[Segment]) -> KVReader:
        """Raises KVMissing."""
        stored = self._store.open_reader(chain)
        try:
            plan = self._planner.plan(chain, self._settings, stored.tier)
            front = self._front(chain[: plan.segments]) if plan.segments else None
        except BaseException:
            stored.close()
            raise
        if front is None:
            self._reader = _TimedReader(stored, self._planner)
            return self._reader
        load_s = "unknown" if plan.load_s is None else f"{plan.load_s:.2f} s"
        log.info(
            "tokens 0-%d of %d are computed (%.2f s) while the rest is loaded (%s)",
            chain[plan.segments - 1].end, chain[-1].end, plan.compute_s, load_s,
        )  # fmt: skip
        try:
            rest = self._store.open_reader(chain[plan.segments :]) if plan.segments < len(chain) else None
        except BaseException:
            front.close()
            stored.close()
            raise
        self._reader = SplitReader(stored, rest, front, self._planner, self._store.layout, chain)
        return self._reader

    def _front(self, chain: Sequence[Segment]) -> "ComputedFront | None":
        try:
            rows = self._open_rows(chain)
        except OutOfMemory as error:
            log.warning("nothing is computed beside loading: %s", error)
            return None
        return ComputedFront(rows, chain, self._tokens[: chain[-1].end], self._settings, self._store, self._device)


class ComputedFront:
    """A prefix's leading segments, computed layer by layer; each layer's KV as the store would give it."""

    def __init__(
        self,
        rows: PrefillRows,
        chain: Sequence[Segment],
        tokens: TokenIds,
        settings: SparseSettings,
        store: KVStore,
        device: torch.device,
    ) -> None:
        self.chain, self.settings = chain, settings
        self._rows, self._tokens, self._device = rows, tokens, device
        layer_bytes = sum(store.layout.layer_bytes(segment.num_tokens) for segment in chain)
        self._buffers = BufferPool(2 * layer_bytes, buffer_memory(device.type))

    def layer(self, layer: int) -> Sequence[memoryview]:
        """Layers come in order, from 0."""
        if layer == 0:
            for _ in self._rows.embed(self._tokens):
                pass
        kept: dict[int, memoryview] = {}

        def keep(segment: int, data: memoryview) -> None:
            buffer = self._buffers.take(data.nbytes).data
            buffer[:] = data
            kept[segment] = buffer

        for _ in self._rows.layer(layer, keep):
            pass
        self._rows.settle()
        if self._device.type == "cuda":  # its time is measured
            torch.cuda.current_stream(self._device).synchronize()
        return [kept[place] for place in range(len(self.chain))]

    def close(self) -> None:
        """Give all memory back but the buffers that somebody still looks at."""
        self._rows.close()
        self._buffers = BufferPool(0)


class SplitReader:
    """A `KVReader` that computes a prefix's front and has the store load the rest meanwhile.

    Where the first layer shows that loading everything would be faster, everything is loaded from then on, unless
    computing is forced.
    """

    def __init__(
        self,
        stored: KVReader,
        rest: KVReader | None,
        front: ComputedFront,
        planner: KVPlanner,
        layout: KVLayout,
        chain: Sequence[Segment],
    ) -> None:
        """`stored` reads the whole chain, `rest` what is behind the front, None where that is everything."""
        self._stored, self._rest, self._planner = stored, rest, planner
        self._front: ComputedFront | None = front
        self._layout = layout
        self._rest_bytes = sum(layout.layer_bytes(segment.num_tokens) for segment in chain[len(front.chain) :])
        self._whole_bytes = sum(layout.layer_bytes(segment.num_tokens) for segment in chain)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kv-rest")
        self._compute_s = 0.0
        self._closed = False
        self.tier: Literal["host", "disk", "shared"] = stored.tier

    @property
    def computed_tokens(self) -> int:
        return 0 if self._front is None else self._front.chain[-1].end

    def read_layer(self, layer: int) -> Sequence[memoryview]:
        """Raises KVMissing, and what computing raises."""
        front = self._front
        if front is None:
            return self._read_stored(layer)
        loading = self._loader.submit(self._load, layer)
        started = time.perf_counter()
        try:
            computed = front.layer(layer)
        except OutOfMemory as error:
            log.warning("everything is loaded from layer %d on: %s", layer, error)
            self._drop_front()
            return self._read_stored(layer)
        compute_s = time.perf_counter() - started
        self._compute_s += compute_s
        loaded, load_s = loading.result()
        if self._rest is not None:
            self.tier = self._rest.tier
        if layer == 0 and self._rest is not None:
            self._planner.loaded(self._rest.tier, self._rest_bytes, load_s)
            whole_s = load_s * self._whole_bytes / self._rest_bytes
            if self._planner.way == "auto" and compute_s > _FASTER * whole_s:
                log.info("loading is faster: %.3f s a layer, computing took %.3f s", whole_s, compute_s)
                self._drop_front()
        if layer == self._layout.num_layers - 1 and self._front is not None:
            self._planner.computed(front.chain, front.settings, self._compute_s)
            front.close()
        return [*computed, *loaded]

    def _read_stored(self, layer: int) -> Sequence[memoryview]:
        buffers = self._stored.read_layer(layer)
        self.tier = self._stored.tier
        return buffers

    def _drop_front(self) -> None:
        if self._front is not None:
            self._front.close()
            self._front = None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loader.shutdown()
        if self._front is not None:
            self._front.close()
        if self._rest is not None:
            self._rest.close()
        self._stored.close()

    def _load(self, layer: int) -> tuple[Sequence[memoryview], float]:
        """The rest's buffers, and the seconds until they were there: less than they took where they were ahead."""
        if self._rest is None:
            return [], 0.0
        started = time.perf_counter()
        buffers = self._rest.read_layer(layer)
        return buffers, time.perf_counter() - started


class _TimedReader:
    """A `KVReader` that tells the planner what its tier gives: by the first layer, with nothing ahead of it."""

    computed_tokens = 0

    def __init__(self, reader: KVReader, planner: KVPlanner) -> None:
        self._reader, self._planner = reader, planner
        self.tier: Literal["host", "disk", "shared"] = reader.tier

    def read_layer(self, layer: int) -> Sequence[memoryview]:
        started = time.perf_counter()
        buffers = self._reader.read_layer(layer)
        self.tier = self._reader.tier
        if layer == 0:
            size_bytes = sum(buffer.nbytes for buffer in buffers)
            self._planner.loaded(self.tier, size_bytes, time.perf_counter() - started)
        return buffers

    def close(self) -> None:
        self._reader.close()
