"""What every KV store must do. A test module subclasses KVStoreContract, and whichever of the other classes its store
promises too, and gives them an `open_store` fixture."""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import pytest

from engine.chain import Segment
from engine.errors import KVMissing, StorageFull
from engine.interfaces import KVLayout, KVReader, KVStore, KVWriter
from engine.kv_store.layout import segment_file_bytes
from tests.kv_store.kv_data import LAYOUT, assert_right, chain, payload, store_chain, write_layers


class CappedStore(KVStore, Protocol):
    """What the suite needs to see besides the contract."""

    @property
    def stored_bytes(self) -> int: ...

    def sweep(self) -> int: ...

    def close(self) -> None: ...


class OpenStore(Protocol):
    def __call__(self, *, cap_bytes: int = ..., clock: Any = ...) -> CappedStore:
        """A store over the one folder of this test, closed behind it. A second call: another process's view."""
        ...


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def full_bytes(links: Sequence[Segment], layout: KVLayout = LAYOUT) -> int:
    return sum(segment_file_bytes(layout, segment.num_tokens) for segment in links)


FOUR = chain(3 * 4096 + 100)  # three full segments and a short one


class KVStoreContract:
    """Every store."""

    def test_an_empty_store_matches_nothing(self, open_store: OpenStore) -> None:
        store = open_store()
        assert store.match(FOUR) == 0
        assert store.match([]) == 0
        with pytest.raises(KVMissing, match="segment 0"):
            store.open_reader(FOUR)

    def test_what_was_written_is_read(self, open_store: OpenStore) -> None:
        store = open_store()
        store_chain(store, FOUR)
        assert store.match(FOUR) == len(FOUR)
        reader = store.open_reader(FOUR)
        assert_right(reader, FOUR)
        reader.close()

    def test_another_process_reads_it(self, open_store: OpenStore) -> None:
        store_chain(open_store(), FOUR)
        reader = open_store().open_reader(FOUR)
        assert_right(reader, FOUR)
        reader.close()

    def test_layers_may_be_read_in_any_order_and_again(self, open_store: OpenStore) -> None:
        store = open_store()
        store_chain(store, FOUR)
        reader = store.open_reader(FOUR)
        for layer in (4, 0, 0, 3, 1, 2, 4):
            assert [bytes(buffer) for buffer in reader.read_layer(layer)] == [payload(item, layer) for item in FOUR]
        reader.close()

    def test_buffers_are_read_only_and_outlive_the_reader(self, open_store: OpenStore) -> None:
        store = open_store()
        store_chain(store, FOUR)
        reader = store.open_reader(FOUR)
        first = reader.read_layer(0)
        for layer in range(1, 5):
            reader.read_layer(layer)
        reader.close()
        assert all(buffer.readonly for buffer in first)
        assert [bytes(buffer) for buffer in first] == [payload(item, 0) for item in FOUR]

    def test_a_part_of_the_chain_can_be_read(self, open_store: OpenStore) -> None:
        store = open_store()
        store_chain(store, FOUR)
        reader = store.open_reader(FOUR[:2])
        assert_right(reader, FOUR[:2])
        reader.close()

    def test_unknown_layers_and_closed_readers_are_refused(self, open_store: OpenStore) -> None:
        store = open_store()
        store_chain(store, FOUR)
        reader = store.open_reader(FOUR)
        for layer in (-1, 5):
            with pytest.raises(ValueError, match="expected 0 to 4"):
                reader.read_layer(layer)
        reader.close()
        reader.close()
        with pytest.raises(ValueError, match="closed"):
            reader.read_layer(0)

    def test_match_stops_at_the_first_gap(self, open_store: OpenStore) -> None:
        store = open_store()
        store_chain(store, FOUR[:1])
        store_chain(store, FOUR, first=2)
        assert store.match(FOUR) == 1
        with pytest.raises(KVMissing, match="segment 1"):
            store.open_reader(FOUR)
        store_chain(store, FOUR, first=1)
        assert store.match(FOUR) == 4

    def test_nothing_matches_before_commit(self, open_store: OpenStore) -> None:
        store = open_store()
        writer = store.open_writer(FOUR, first=0, owner="job")
        write_layers(writer, FOUR, range(5))
        writer.flush()
        assert store.match(FOUR) == 0
        writer.commit()
        assert store.match(FOUR) == 4

    def test_the_caller_may_reuse_its_buffer(self, open_store: OpenStore) -> None:
        store = open_store()
        writer = store.open_writer(FOUR[:1], first=0, owner="job")
        buffer = bytearray(LAYOUT.layer_bytes(4096))
        for layer in range(5):
            buffer[:] = payload(FOUR[0], layer)
            writer.write_layer(layer, 0, memoryview(buffer))
            buffer[:] = bytes(len(buffer))
        writer.commit()
        reader = store.open_reader(FOUR[:1])
        assert_right(reader, FOUR[:1])
        reader.close()

    def test_wrong_sizes_and_orders_are_refused(self, open_store: OpenStore) -> None:
        store = open_store()
        writer = store.open_writer(FOUR, first=0, owner="job")
        with pytest.raises(ValueError, match="got 10 bytes for segment 0, expected 8192"):
            writer.write_layer(0, 0, memoryview(bytes(10)))
        with pytest.raises(ValueError, match="got layer 1 of segment 0, expected layer 0"):
            writer.write_layer(1, 0, memoryview(payload(FOUR[0], 1)))
        writer.write_layer(0, 0, memoryview(payload(FOUR[0], 0)))
        with pytest.raises(ValueError, match="got layer 0 of segment 0, expected layer 1"):
            writer.write_layer(0, 0, memoryview(payload(FOUR[0], 0)))
        writer.abort()
        with pytest.raises(ValueError, match="closed"):
            writer.write_layer(1, 0, memoryview(payload(FOUR[0], 1)))

    def test_an_incomplete_writer_commits_nothing(self, open_store: OpenStore) -> None:
        store = open_store()
        writer = store.open_writer(FOUR, first=0, owner="job")
        write_layers(writer, FOUR, range(4))
        with pytest.raises(Exception, match="got 2 of 3 layer groups"):
            writer.commit()
        writer.abort()
        assert store.match(FOUR) == 0
        assert store.stored_bytes == 0

    def test_a_writer_of_nothing_commits(self, open_store: OpenStore) -> None:
        store = open_store()
        store_chain(store, FOUR)
        writer = store.open_writer(FOUR, first=4, owner="job")
        assert writer.groups_done() == 3
        writer.commit()
        with pytest.raises(ValueError, match="first"):
            store.open_writer(FOUR, first=5, owner="job")

    def test_abort_leaves_nothing(self, open_store: OpenStore) -> None:
        store = open_store()
        writer = store.open_writer(FOUR, first=0, owner="job")
        write_layers(writer, FOUR, range(3))
        writer.abort()
        writer.abort()
        assert store.stored_bytes == 0
        assert store.open_writer(FOUR, first=0, owner="job").groups_done() == 0

    def test_two_writers_of_one_key_both_end_well(self, open_store: OpenStore) -> None:
        one, two = open_store(), open_store()
        writers = [one.open_writer(FOUR, first=0, owner="a"), two.open_writer(FOUR, first=0, owner="b")]
        failures: list[Exception] = []

        def run(writer: KVWriter) -> None:
            try:
                write_layers(writer, FOUR, range(5))
                writer.commit()
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(writer,)) for writer in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert one.stored_bytes == full_bytes(FOUR)
        reader = two.open_reader(FOUR)
        assert_right(reader, FOUR)
        reader.close()

    def test_a_stored_segment_is_not_written_again(self, open_store: OpenStore) -> None:
        store = open_store()
        store_chain(store, FOUR)
        writer = store.open_writer(FOUR, first=0, owner="again")
        assert store.stored_bytes == full_bytes(FOUR)
        assert writer.groups_done() == 3
        write_layers(writer, FOUR, range(5))
        writer.commit()
        assert store.stored_bytes == full_bytes(FOUR)

    def test_release_removes_what_nobody_else_holds(self, open_store: OpenStore) -> None:
        store = open_store()
        a, b = chain(3 * 4096, seed=1, shared=4096), chain(2 * 4096, seed=2, shared=4096)
        assert a[0] == b[0]
        assert a[1] != b[1]
        for name, links in (("a", a), ("b", b)):
            store_chain(store, links, owner=name, first=store.match(links))
            store.attach(links, name, ttl_s=None, pinned=False)
        assert store.stored_bytes == full_bytes(a) + full_bytes(b[1:])
        assert store.release("a") == full_bytes(a[1:])
        assert (store.match(a), store.match(b)) == (1, 2)
        assert store.release("a") == 0
        assert store.release("b") == full_bytes(b)
        assert store.stored_bytes == 0

    def test_a_segment_lives_as_long_as_the_longest_ttl(self, open_store: OpenStore) -> None:
        clock = Clock()
        store = open_store(clock=clock)
        store_chain(store, FOUR)
        store.attach(FOUR[:2], "short", ttl_s=10.0, pinned=False)
        store.attach(FOUR, "long", ttl_s=100.0, pinned=False)
        clock.now += 50
        assert store.match(FOUR) == 4
        store.set_policy("long", ttl_s=60.0, pinned=False)
        clock.now += 59
        assert store.match(FOUR) == 4
        clock.now += 2
        assert store.match(FOUR) == 0
        assert store.sweep() == full_bytes(FOUR)

    def test_use_and_pins_keep_a_segment_beyond_its_ttl(self, open_store: OpenStore) -> None:
        clock = Clock()
        store = open_store(clock=clock)
        store_chain(store, FOUR)
        store.attach(FOUR, "doc", ttl_s=10.0, pinned=False)
        clock.now += 9
        store.open_reader(FOUR).close()
        clock.now += 9
        assert store.match(FOUR) == 4
        store.set_policy("doc", ttl_s=10.0, pinned=True)
        clock.now += 1000
        assert store.sweep() == 0
        assert store.match(FOUR) == 4

    def test_what_expired_goes_with_a_sweep(self, open_store: OpenStore) -> None:
        clock = Clock()
        store = open_store(clock=clock)
        store_chain(store, FOUR)
        store.attach(FOUR, "doc", ttl_s=10.0, pinned=False)
        clock.now += 11
        assert store.match(FOUR) == 0
        store_chain(store, FOUR, owner="again")
        assert store.match(FOUR) == 4
        clock.now += 11
        assert store.sweep() >= full_bytes(FOUR)
        assert store.stored_bytes == 0


class CapContract:
    """A store with a cap of its own."""

    def test_the_cap_is_held_before_writing(self, open_store: OpenStore) -> None:
        store = open_store(cap_bytes=full_bytes(FOUR) - 1)
        with pytest.raises(StorageFull) as raised:
            store.open_writer(FOUR, first=0, owner="job")
        assert raised.value.needed_bytes == full_bytes(FOUR)
        assert raised.value.available_bytes == full_bytes(FOUR) - 1
        assert store.stored_bytes == 0
        store_chain(store, FOUR[:3])

    def test_room_is_reserved_when_the_writer_opens(self, open_store: OpenStore) -> None:
        a, b = chain(2 * 4096, seed=1), chain(2 * 4096, seed=2)
        one, two = open_store(cap_bytes=full_bytes(a) * 3 // 2), open_store(cap_bytes=full_bytes(a) * 3 // 2)
        writer = one.open_writer(a, first=0, owner="a")
        with pytest.raises(StorageFull) as raised:
            two.open_writer(b, first=0, owner="b")
        assert raised.value.available_bytes == full_bytes(a) // 2
        writer.abort()
        store_chain(two, b)

    def test_the_least_recently_used_goes_first(self, open_store: OpenStore) -> None:
        clock = Clock()
        docs = [chain(4096, seed=seed) for seed in range(4)]
        store = open_store(cap_bytes=3 * full_bytes(docs[0]), clock=clock)
        for index, links in enumerate(docs[:3]):
            clock.now += 1
            store_chain(store, links, owner=f"job {index}")
        clock.now += 1
        store.open_reader(docs[0]).close()
        store_chain(store, docs[3])
        assert [store.match(links) for links in docs] == [1, 0, 1, 1]

    def test_a_chain_loses_its_end_first(self, open_store: OpenStore) -> None:
        clock = Clock()
        store = open_store(cap_bytes=full_bytes(FOUR), clock=clock)
        store_chain(store, FOUR)
        clock.now += 1
        store_chain(store, chain(4096, seed=1))
        assert store.match(FOUR) == 2

    def test_a_failed_reservation_evicts_nothing(self, open_store: OpenStore) -> None:
        old = chain(2 * 4096, seed=1)
        store = open_store(cap_bytes=full_bytes(old))
        store_chain(store, old)
        with pytest.raises(StorageFull):
            store.open_writer(chain(3 * 4096, seed=2), first=0, owner="b")
        assert store.match(old) == 2

    def test_nothing_pinned_is_evicted(self, open_store: OpenStore) -> None:
        docs = [chain(4096, seed=seed) for seed in range(3)]
        size = full_bytes(docs[0])
        store = open_store(cap_bytes=2 * size)
        for index, links in enumerate(docs[:2]):
            store_chain(store, links, owner=f"job {index}")
            store.attach(links, f"doc {index}", ttl_s=None, pinned=True)
        with pytest.raises(StorageFull) as raised:
            store.open_writer(docs[2], first=0, owner="c")
        assert (raised.value.needed_bytes, raised.value.available_bytes) == (size, 0)
        store.set_policy("doc 1", ttl_s=None, pinned=False)
        store_chain(store, docs[2])
        assert [store.match(links) for links in docs] == [1, 0, 1]


class UnfinishedWorkContract:
    """A store that keeps what a writer has published before it committed."""

    def test_groups_are_done_before_the_commit(self, open_store: OpenStore) -> None:
        store = open_store()
        writer = store.open_writer(FOUR, first=0, owner="job")
        write_layers(writer, FOUR, range(5))
        writer.flush()
        assert writer.groups_done() == 3
        writer.abort()

    def test_a_suspended_writer_goes_on_behind_its_published_groups(self, open_store: OpenStore) -> None:
        store = open_store()
        writer = store.open_writer(FOUR, first=0, owner="job")
        write_layers(writer, FOUR, range(3))
        writer.suspend()
        again = open_store().open_writer(FOUR, first=0, owner="job")
        assert again.groups_done() == 1
        write_layers(again, FOUR, range(2, 5))
        again.commit()
        reader = store.open_reader(FOUR)
        assert_right(reader, FOUR)
        reader.close()

    def test_layers_that_are_published_may_be_handed_over_again(self, open_store: OpenStore) -> None:
        store = open_store()
        writer = store.open_writer(FOUR, first=0, owner="job")
        write_layers(writer, FOUR, range(4))
        writer.suspend()
        again = store.open_writer(FOUR, first=0, owner="job")
        assert again.groups_done() == 2
        write_layers(again, FOUR, range(1, 5))
        again.commit()
        reader = store.open_reader(FOUR)
        assert_right(reader, FOUR)
        reader.close()

    def test_another_owner_does_not_take_it_up(self, open_store: OpenStore) -> None:
        store = open_store()
        writer = store.open_writer(FOUR, first=0, owner="job")
        write_layers(writer, FOUR, range(4))
        writer.suspend()
        other = store.open_writer(FOUR, first=0, owner="other")
        assert other.groups_done() == 0
        other.abort()

    def test_an_attempt_that_ended_without_a_word_is_taken_up(self, open_store: OpenStore) -> None:
        store = open_store()
        writer = store.open_writer(FOUR, first=0, owner="job")
        write_layers(writer, FOUR, range(4))
        writer.flush()
        again = store.open_writer(FOUR, first=0, owner="job")
        assert again.groups_done() == 2
        write_layers(again, FOUR, range(4, 5))
        again.commit()
        assert store.match(FOUR) == 4

    def test_a_shorter_chain_of_the_same_owner_drops_the_rest(self, open_store: OpenStore) -> None:
        store = open_store()
        writer = store.open_writer(FOUR, first=0, owner="job")
        write_layers(writer, FOUR, range(4))
        writer.suspend()
        again = store.open_writer(FOUR[:2], first=0, owner="job")
        assert again.groups_done() == 2
        again.abort()
        assert store.stored_bytes == 0


class LeaseContract:
    """A store that keeps what is being read or built on."""

    def test_release_waits_for_readers_but_matches_no_more(self, open_store: OpenStore) -> None:
        store, api = open_store(), open_store()
        store_chain(store, FOUR)
        store.attach(FOUR, "doc", ttl_s=None, pinned=False)
        reader = store.open_reader(FOUR)
        assert api.release("doc") == 0
        assert store.match(FOUR) == 0
        assert_right(reader, FOUR)
        assert api.stored_bytes == full_bytes(FOUR)
        reader.close()
        assert api.stored_bytes == 0

    def test_attaching_saves_a_segment_from_a_release_under_way(self, open_store: OpenStore) -> None:
        store = open_store()
        store_chain(store, FOUR)
        store.attach(FOUR, "a", ttl_s=None, pinned=False)
        reader = store.open_reader(FOUR)
        store.release("a")
        store.attach(FOUR, "b", ttl_s=None, pinned=False)
        reader.close()
        assert store.match(FOUR) == 4

    def test_a_release_does_not_take_what_a_writer_builds_on(self, open_store: OpenStore) -> None:
        store = open_store()
        store_chain(store, FOUR[1:3], owner="a")
        store.attach(FOUR[1:3], "a", ttl_s=None, pinned=False)
        writer = store.open_writer(FOUR, first=0, owner="b")
        store.release("a")
        write_layers(writer, FOUR, range(5))
        writer.commit()
        assert store.match(FOUR) == 4
        reader = store.open_reader(FOUR)
        assert_right(reader, FOUR)
        reader.close()

    def test_an_expired_segment_can_be_written_again(self, open_store: OpenStore) -> None:
        clock = Clock()
        store = open_store(clock=clock)
        store_chain(store, FOUR)
        store.attach(FOUR, "doc", ttl_s=10.0, pinned=False)
        reader = store.open_reader(FOUR)
        clock.now += 11
        assert store.match(FOUR) == 0
        store_chain(store, FOUR, owner="again")
        assert store.match(FOUR) == 4
        assert_right(reader, FOUR)
        reader.close()
        assert store.stored_bytes == full_bytes(FOUR)

    def test_nothing_pinned_or_in_use_is_evicted(self, open_store: OpenStore) -> None:
        docs = [chain(4096, seed=seed) for seed in range(3)]
        size = full_bytes(docs[0])
        store = open_store(cap_bytes=2 * size)
        store_chain(store, docs[0], owner="a")
        store.attach(docs[0], "a", ttl_s=None, pinned=True)
        store_chain(store, docs[1], owner="b")
        reader: KVReader = store.open_reader(docs[1])
        with pytest.raises(StorageFull) as raised:
            store.open_writer(docs[2], first=0, owner="c")
        assert (raised.value.needed_bytes, raised.value.available_bytes) == (size, 0)
        reader.close()
        store_chain(store, docs[2])
        assert [store.match(links) for links in docs] == [1, 0, 1]
        store.set_policy("a", ttl_s=None, pinned=False)
        store_chain(store, docs[1])
        assert [store.match(links) for links in docs] == [0, 1, 1]

    def test_orphans_count_and_go_first(self, open_store: OpenStore) -> None:
        stored, orphan, new = (chain(4096, seed=seed) for seed in range(3))
        size = full_bytes(stored)
        store = open_store(cap_bytes=2 * size)
        store_chain(store, stored, owner="a")
        writer = store.open_writer(orphan, first=0, owner="b")
        write_layers(writer, orphan, range(4))
        writer.suspend()
        assert size < store.stored_bytes < 2 * size
        store_chain(store, new, owner="c")
        assert (store.match(stored), store.match(new)) == (1, 1)
        assert store.open_writer(orphan, first=0, owner="b").groups_done() == 0
