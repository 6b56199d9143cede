"""A KV store whose waiting is timed: what stage `kv_store` costs answers and prefills beside their computing."""

import time
from collections.abc import Sequence
from typing import Literal

from engine.chain import Segment
from engine.interfaces import KVReader, KVStore, KVWriter
from service.metrics import Metrics


class TimedKVStore:
    """A `KVStore` in front of another. One observation of stage `kv_store` a reader and a writer."""

    def __init__(self, store: KVStore, metrics: Metrics) -> None:
        self._store, self._metrics = store, metrics
        self.layout = store.layout
        self.match = store.match
        self.attach = store.attach
        self.set_policy = store.set_policy
        self.release = store.release

    def open_reader(self, chain: Sequence[Segment]) -> KVReader:
        with _Watch(self._metrics) as watch:
            reader = self._store.open_reader(chain)
        return _TimedReader(reader, watch)

    def open_writer(self, chain: Sequence[Segment], *, first: int, owner: str) -> KVWriter:
        with _Watch(self._metrics) as watch:
            writer = self._store.open_writer(chain, first=first, owner=owner)
        return _TimedWriter(writer, watch)


class _Watch:
    """Adds up the time within its blocks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seconds: float | None = 0.0
        self._started = 0.0

    def __enter__(self) -> "_Watch":
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._started
        self._metrics.kv_waited_s += seconds
        if self._seconds is not None:
            self._seconds += seconds

    def observe(self) -> None:
        """Once."""
        if self._seconds is not None:
            self._metrics.stage_seconds.labels("kv_store").observe(self._seconds)
            self._seconds = None


class _TimedReader:
    def __init__(self, reader: KVReader, watch: _Watch) -> None:
        self._reader, self._watch = reader, watch
        self.tier: Literal["host", "disk", "shared"] = reader.tier

    def read_layer(self, layer: int) -> Sequence[memoryview]:
        with self._watch:
            layers = self._reader.read_layer(layer)
        self.tier = self._reader.tier
        return layers

    def close(self) -> None:
        self._reader.close()
        self._watch.observe()


class _TimedWriter:
    def __init__(self, writer: KVWriter, watch: _Watch) -> None:
        self._writer, self._watch = writer, watch
        self.groups_done = writer.groups_done
        self.suspend = writer.suspend
        self.abort = writer.abort

    def write_layer(self, layer: int, segment: int, data: memoryview) -> None:
        with self._watch:
            self._writer.write_layer(layer, segment, data)

    def flush(self) -> None:
        with self._watch:
            self._writer.flush()

    def commit(self) -> None:
        with self._watch:
            self._writer.commit()
        self._watch.observe()
