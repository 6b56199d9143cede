"""The store's small parts: layout, buffers, host memory, counters."""

import gc
import threading

import numpy as np
import pytest

from engine.interfaces import KVLayout
from engine.kv_store import Counters, DiskLimits, LocalKVStore, layout_for
from engine.kv_store.buffers import BufferPool, plain_memory
from engine.kv_store.host_cache import HostCache
from engine.kv_store.layout import group_file_bytes, group_layers, segment_file_bytes

MIB = 1024**2


@pytest.mark.parametrize(
    ("num_layers", "bytes_per_token"),
    [(30, 768), (32, 4096), (32, 2112), (28, 1024), (80, 4096), (36, 2048), (48, 8192)],
    ids=["smollm2", "8b", "8b fp8", "qwen 1.5b", "70b", "qwen 3b", "yi"],
)
def test_layouts_of_real_models_have_files_of_16_to_32_mib(num_layers: int, bytes_per_token: int) -> None:
    layout = layout_for(num_layers, bytes_per_token)
    sizes = [group_file_bytes(layout, 4096, group) for group in range(layout.num_groups)]
    assert 16 * MIB <= sizes[0] <= 33 * MIB
    assert sum(sizes) == segment_file_bytes(layout, 4096)
    assert [layer for group in range(layout.num_groups) for layer in group_layers(layout, group)] == [
        *range(num_layers)
    ]


def test_tiny_and_huge_layers_have_a_layout_too() -> None:
    assert layout_for(200, 1).layers_per_group <= 128
    assert layout_for(4, 2**20).layers_per_group == 1
    for wrong in ((0, 768), (30, 0), (-1, 1)):
        with pytest.raises(ValueError, match="expected positive"):
            layout_for(*wrong)


@pytest.mark.parametrize("layout", [KVLayout(0, 1, 1), KVLayout(5, 0, 1), KVLayout(5, 1, 0), KVLayout(500, 1, 129)])
def test_impossible_layouts_are_refused(layout: KVLayout, tmp_path: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        LocalKVStore(tmp_path, layout, DiskLimits(1))  # type: ignore[arg-type]


def test_buffers_that_were_filled_are_taken_first() -> None:
    made: list[int] = []

    def allocate(size_bytes: int) -> np.ndarray:
        made.append(size_bytes)
        return plain_memory(size_bytes)

    pool = BufferPool(1000, allocate)
    pool.fill(400, 2)
    assert made == [400, 400]
    first, second = pool.take(400), pool.take(400)
    first[:] = 1
    assert not second.any(), "they don't overlap"
    assert made == [400, 400]
    with pytest.raises(ValueError, match="expected 1000 at most"):
        pool.fill(400, 3)


def test_buffers_come_back_only_when_no_view_is_left() -> None:
    made: list[int] = []

    def allocate(size_bytes: int) -> np.ndarray:
        made.append(size_bytes)
        return plain_memory(size_bytes)

    pool = BufferPool(1000, allocate)
    view = pool.take(400).data.toreadonly()[10:20]
    gc.collect()
    second = pool.take(400)
    assert made == [400, 400]
    del view
    third = pool.take(400)
    assert made == [400, 400]
    assert third.ctypes.data != second.ctypes.data
    array = np.frombuffer(third.data, np.uint8)[5:]
    del third
    pool.take(400)
    assert made == [400, 400, 400]
    del array


def test_idle_buffers_are_bounded() -> None:
    made: list[int] = []

    def allocate(size_bytes: int) -> np.ndarray:
        made.append(size_bytes)
        return plain_memory(size_bytes)

    pool = BufferPool(1000, allocate)
    held = [pool.take(400) for _ in range(5)]
    held.clear()
    held = [pool.take(400) for _ in range(5)]
    assert len(made) == 8  # two of the first five were kept


def test_small_idle_buffers_make_way_for_large_ones() -> None:
    made: list[int] = []

    def allocate(size_bytes: int) -> np.ndarray:
        made.append(size_bytes)
        return plain_memory(size_bytes)

    pool = BufferPool(1000, allocate)
    for size in range(100, 200):  # the ends of many documents
        pool.take(size)
    for _ in range(3):
        pool.take(900)
    assert made == [*range(100, 200), 900]
    pool.take(150)  # and never the other way round
    pool.take(900)
    assert made[101:] == [150]


def block(value: int, size: int = 100) -> memoryview:
    return memoryview(bytes([value]) * size)


def test_the_host_cache_keeps_to_its_cap_and_drops_the_oldest() -> None:
    counters = Counters()
    cache = HostCache(300, counters)
    for layer in range(3):
        cache.put("a", layer, block(layer), reader=1)
    assert cache.get("a", 0, reader=2) == block(0)
    cache.put("b", 0, block(9), reader=2)
    assert cache.get("a", 1, reader=2) is None
    assert cache.get("a", 0, reader=2) == block(0)
    assert cache.used_bytes == 300
    assert counters.get("evictions", "host", "capacity") == 1
    assert cache.bytes_by_copy() == {"a": 200, "b": 100}
    assert (cache.holds("b", 1), cache.holds("a", 3)) == (True, False)
    cache.drop({"a"})
    assert (cache.used_bytes, cache.get("a", 0, reader=3)) == (100, None)


def test_a_reader_larger_than_the_host_cache_keeps_its_beginning() -> None:
    cache = HostCache(300, Counters())
    for serial in (1, 2):
        hits = []
        for layer in range(5):
            if cache.get("a", layer, serial) is not None:
                hits.append(layer)
            else:
                cache.put("a", layer, block(layer), serial)
        assert hits == ([] if serial == 1 else [0, 1, 2])


def test_a_block_larger_than_the_cache_is_not_kept() -> None:
    cache = HostCache(99, Counters())
    cache.put("a", 0, block(1), reader=1)
    assert (cache.used_bytes, cache.get("a", 0, reader=1)) == (0, None)


def test_counters_sum_call_back_and_check_their_labels() -> None:
    seen: list[tuple[str, tuple[str, ...], int]] = []
    counters = Counters(lambda name, labels, amount: seen.append((name, labels, amount)))
    counters.add("evictions", "disk", "capacity")
    counters.add("evictions", "disk", "expired", amount=3)
    counters.add("evictions", "host", "capacity")
    assert counters.get("evictions") == 5
    assert counters.get("evictions", "disk") == 4
    assert counters.snapshot()["evictions", "disk", "expired"] == 3
    assert seen[1] == ("evictions", ("disk", "expired"), 3)
    with pytest.raises(ValueError, match="labels"):
        counters.add("evictions", "disk")
    with pytest.raises(KeyError):
        counters.add("evicted")


def test_counters_lose_nothing_between_threads() -> None:
    counters = Counters()
    threads = [
        threading.Thread(target=lambda: [counters.add("misses") for _ in range(1000)] and None) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.get("misses") == 4000
