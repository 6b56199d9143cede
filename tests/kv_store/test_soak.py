"""Random work of two stores on one folder: the cap is never overrun, nothing wrong is served, nothing leaks."""

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.chain import Segment
from engine.errors import KVMissing, StorageFull
from engine.interfaces import KVReader, KVWriter
from engine.kv_store import DiskLimits, LocalKVStore
from engine.kv_store.layout import segment_file_bytes
from tests.contracts.kv_store_contract import Clock
from tests.kv_store.kv_data import LAYOUT, chain, payload, write_layers

CAP_BYTES = 6 * segment_file_bytes(LAYOUT, 4096)
DOCUMENTS = [chain(count, seed=seed, shared=4096) for seed, count in enumerate((4096, 5000, 8192, 9000, 12288, 100))]
documents = st.integers(0, len(DOCUMENTS) - 1)


class Soak(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.stores: list[LocalKVStore] = []
        self.writers: list[tuple[KVWriter, list[Segment], int]] = []  # writer, its own segments, next layer
        self.readers: list[tuple[KVReader, list[Segment]]] = []
        self.pinned: dict[str, list[Segment]] = {}  # holder → what was stored when it was pinned

    @initialize(host_kib=st.sampled_from([0, 40, 1024]))
    def open(self, host_kib: int) -> None:
        limits = DiskLimits(CAP_BYTES)
        for _ in range(2):
            host = host_kib * 1024
            self.stores.append(LocalKVStore(self.folder, LAYOUT, limits, host_bytes=host, clock=self.clock))

    @rule(store=st.integers(0, 1), document=documents, owner=st.sampled_from("abc"))
    def open_writer(self, store: int, document: int, owner: str) -> None:
        links = DOCUMENTS[document]
        first = self.stores[store].match(links)
        try:
            writer = self.stores[store].open_writer(links, first=first, owner=owner)
        except StorageFull as error:
            if error.needed_bytes <= error.available_bytes:
                raise
            return
        self.writers.append((writer, links[first:], min(writer.groups_done() * 2, 5)))

    @precondition(lambda self: self.writers)
    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 5))
    def write(self, choice: random.Random, count: int) -> None:
        index = choice.randrange(len(self.writers))
        writer, own, layer = self.writers[index]
        try:
            write_layers(writer, own, range(layer, min(layer + count, 5)))
            writer.flush()
        except ValueError as error:
            if "closed" not in str(error):  # else the same owner opened another one
                raise
            self.writers.pop(index)
        else:
            self.writers[index] = (writer, own, min(layer + count, 5))

    @precondition(lambda self: self.writers)
    @rule(choice=st.randoms(use_true_random=False), keep=st.booleans())
    def end_writer(self, choice: random.Random, keep: bool) -> None:
        writer, _, layer = self.writers.pop(choice.randrange(len(self.writers)))
        if layer < 5:
            writer.suspend() if keep else writer.abort()
            return
        try:
            writer.commit()
        except ValueError as error:
            if "closed" not in str(error):
                raise

    @rule(store=st.integers(0, 1), document=documents)
    def open_reader(self, store: int, document: int) -> None:
        links = DOCUMENTS[document]
        links = links[: self.stores[store].match(links)]
        if links:
            self.readers.append((self.stores[store].open_reader(links), links))

    @precondition(lambda self: self.readers)
    @rule(choice=st.randoms(use_true_random=False), layer=st.integers(0, 4), close=st.booleans())
    def read(self, choice: random.Random, layer: int, close: bool) -> None:
        index = choice.randrange(len(self.readers))
        reader, links = self.readers[index]
        assert [bytes(data) for data in reader.read_layer(layer)] == [payload(segment, layer) for segment in links]
        if close:
            reader.close()
            self.readers.pop(index)

    @rule(store=st.integers(0, 1), document=documents, ttl_s=st.sampled_from([None, 5.0, 50.0]), pinned=st.booleans())
    def attach(self, store: int, document: int, ttl_s: float | None, pinned: bool) -> None:
        links = DOCUMENTS[document]
        self.stores[store].attach(links, str(document), ttl_s=ttl_s, pinned=pinned)
        self.pinned.pop(str(document), None)
        if pinned:
            self.pinned[str(document)] = links[: self.stores[store].match(links)]

    @rule(store=st.integers(0, 1), document=documents)
    def release(self, store: int, document: int) -> None:
        self.pinned.pop(str(document), None)
        self.stores[store].release(str(document))

    @rule(store=st.integers(0, 1), seconds=st.sampled_from([1, 10, 100]))
    def sweep(self, store: int, seconds: int) -> None:
        self.clock.now += seconds
        self.stores[store].sweep()

    @rule(store=st.integers(0, 1), size=st.integers(0, CAP_BYTES))
    def evict(self, store: int, size: int) -> None:
        self.stores[store].catalog.evict(size_bytes=size)

    @rule(document=documents)
    def missing_is_said(self, document: int) -> None:
        links = DOCUMENTS[document]
        if self.stores[0].match(links) < len(links):
            try:
                self.stores[0].open_reader(links).close()
            except KVMissing:
                return
            raise AssertionError("opened a reader of a chain that does not match")

    @invariant()
    def the_cap_holds(self) -> None:
        if self.stores:
            on_disk = sum(path.stat().st_size for path in (self.folder / "blocks").iterdir())
            assert on_disk <= self.stores[0].stored_bytes <= CAP_BYTES

    @invariant()
    def pinned_segments_stay(self) -> None:
        for links in self.pinned.values():
            assert self.stores[0].match(links) == len(links)

    def teardown(self) -> None:
        for reader, _ in self.readers:
            reader.close()
        for writer, _, _ in self.writers:
            writer.abort()
        for store in self.stores:
            store.sweep()
        if self.stores:
            on_disk = sum(path.stat().st_size for path in (self.folder / "blocks").iterdir())
            assert on_disk == self.stores[0].stored_bytes
            assert not self.stores[0].counters.get("checksum_failures")
        for store in self.stores:
            store.close()
        shutil.rmtree(self.folder)


TestSoak = Soak.TestCase
TestSoak.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
