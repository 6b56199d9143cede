"""Tiers that several machines share: each under the contract, and behind a machine's own store. Redis is a real one."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import KVMissing, StorageFull
from engine.kv_store import Counters, DiskLimits, LocalKVStore
from engine.kv_store.costs import Costs
from engine.kv_store.redis_tier import PREFIX, RedisKVStore
from engine.kv_store.tiered import LEFT_ALONE_S, SharedTier, TieredKVStore
from loadtests.redis_server import RedisServer
from tests.contracts.kv_store_contract import (
    CapContract,
    Clock,
    KVStoreContract,
    OpenStore,
    UnfinishedWorkContract,
    full_bytes,
)
from tests.kv_store.kv_data import LAYOUT, assert_right, chain, store_chain, write_layers

MIB = 1024**2
LINKS = chain(3 * 4096 + 100)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(server: RedisServer) -> str:
    if server.process is None:
        server.start()
    server.client.flushall()
    return server.url


# --- each tier by itself ---


class TestRedis(KVStoreContract, CapContract):
    @pytest.fixture
    def open_store(self, redis_url: str) -> Iterator[OpenStore]:
        stores: list[RedisKVStore] = []

        def open_one(*, cap_bytes: int = 64 * MIB, clock: Callable[[], float] | None = None) -> RedisKVStore:
            stores.append(RedisKVStore(redis_url, LAYOUT, cap_bytes=cap_bytes, clock=clock))
            return stores[-1]

        yield open_one
        for store in stores:
            store.close()


class _Settled(TieredKVStore):
    """Waits for its copies, so that tests see what they lead to."""

    def copy_to_shared(self, chain: Any) -> None:
        super().copy_to_shared(chain)
        self.drain()

    def copy_here(self, chain: Any, tier: SharedTier) -> None:
        super().copy_here(chain, tier)
        self.drain()


class TestTiered(KVStoreContract, UnfinishedWorkContract):
    @pytest.fixture(params=["directory", "redis"])
    def open_store(self, request: pytest.FixtureRequest, tmp_path: Path, redis_url: str) -> Iterator[OpenStore]:
        stores: list[TieredKVStore] = []

        def open_one(*, cap_bytes: int = 64 * MIB, clock: Callable[[], float] = time.time) -> TieredKVStore:
            local = LocalKVStore(tmp_path / "here", LAYOUT, DiskLimits(cap_bytes), clock=clock)
            if request.param == "directory":
                far: Any = LocalKVStore(
                    tmp_path / "far", LAYOUT, DiskLimits(cap_bytes), clock=clock, several_machines=True
                )
            else:
                far = RedisKVStore(redis_url, LAYOUT, cap_bytes=cap_bytes, clock=clock)
            stores.append(_Settled(local, [SharedTier(request.param, far)], tmp_path / "pending"))
            return stores[-1]

        yield open_one
        for store in stores:
            store.close()


def test_redis_takes_no_large_documents(redis_url: str) -> None:
    store = RedisKVStore(redis_url, LAYOUT, cap_bytes=64 * MIB, max_document_bytes=full_bytes(LINKS) - 1)
    with pytest.raises(StorageFull):
        store.open_writer(LINKS, first=0, owner="job")
    store_chain(store, LINKS[:3])
    store.close()


def test_values_over_a_part_are_split(redis_url: str, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kv_store.redis_tier.PART_BYTES", 3000)  # a layer has 8192 bytes
    store = RedisKVStore(redis_url, LAYOUT, cap_bytes=64 * MIB)
    store_chain(store, LINKS)
    sizes = [server.client.strlen(name) for name in server.client.keys(f"{PREFIX}part:*")]
    assert max(sizes) == 3000
    assert len(sizes) == LAYOUT.num_layers * (3 * 3 + 1)
    reader = store.open_reader(LINKS)
    assert_right(reader, LINKS)
    reader.close()
    store.attach(LINKS, "doc", ttl_s=None, pinned=False)
    store.release("doc")
    assert [name for name in server.client.keys("*") if b"part" in name or b"head" in name] == []
    store.close()


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "another's"])
@pytest.mark.parametrize("what", ["part", "head"])
def test_damage_in_redis_is_a_miss(what: str, damage: str, redis_url: str, server: RedisServer) -> None:
    counters = Counters()
    store = RedisKVStore(redis_url, LAYOUT, cap_bytes=64 * MIB, counters=counters)
    store_chain(store, LINKS)
    names = sorted(server.client.keys(f"{PREFIX}{what}:*"))
    name, other = names[0], names[-1]
    value = bytearray(server.client.get(name))
    if damage == "flipped":
        value[len(value) // 3] ^= 4
        server.client.set(name, bytes(value))
    elif damage == "cut":
        server.client.set(name, bytes(value[:-1]))
    elif damage == "gone":
        server.client.delete(name)
    else:
        server.client.set(name, server.client.get(other))

    def read() -> None:
        reader = store.open_reader(LINKS)
        try:
            assert_right(reader, LINKS)
        finally:
            reader.close()

    with pytest.raises(KVMissing):
        read()
    assert counters.get("checksum_failures") + counters.get("read_errors") >= 1
    assert store.match(LINKS) < 4
    store_chain(store, LINKS)
    read()
    store.close()


def test_what_a_dead_writer_left_in_redis_goes(redis_url: str, server: RedisServer) -> None:
    clock = Clock()
    store = RedisKVStore(redis_url, LAYOUT, cap_bytes=full_bytes(LINKS), clock=clock)
    writer = store.open_writer(LINKS, first=0, owner="job")
    write_layers(writer, LINKS, range(3))
    with pytest.raises(StorageFull):
        store.open_writer(chain(4096, seed=5), first=0, owner="other")
    clock.now += 601
    store_chain(store, chain(4096, seed=5))
    assert store.stored_bytes == full_bytes(LINKS[:1])
    write_layers(writer, LINKS, range(3, 5))
    with pytest.raises(Exception, match="given to others"):
        writer.commit()
    assert store.match(LINKS) == 0
    store.close()


@pytest.mark.parametrize("committed", [False, True])
def test_a_writer_that_could_not_end_ends_later(committed: bool, redis_url: str, server: RedisServer) -> None:
    store = RedisKVStore(redis_url, LAYOUT, cap_bytes=full_bytes(LINKS))
    writer: Any = store.open_writer(LINKS, first=0, owner="job")
    write_layers(writer, LINKS, range(5))
    if committed:  # the answer is lost, not the commit
        store._client.close()
        end = store._end

        def lost(*arguments: Any) -> int:
            end(*arguments)
            raise OSError("the connection is gone")

        store._end = lost  # type: ignore[method-assign]
        with pytest.raises(OSError, match="is gone"):
            writer.commit()
        store._end = end  # type: ignore[method-assign]
    else:
        server.kill()
        with pytest.raises(OSError, match="Redis failed"):
            writer.commit()
        writer.abort()
        server.start()
    store.sweep()
    if committed:
        reader = store.open_reader(LINKS)
        assert_right(reader, LINKS)
        reader.close()
    else:
        assert store.stored_bytes == 0
        store_chain(store, LINKS)
    store.close()


# --- behind a machine's own store ---


class Machines:
    """Each with a folder of its own, before one shared tier."""

    def __init__(self, folder: Path, kind: str, redis_url: str) -> None:
        self._folder, self._kind, self._redis_url = folder, kind, redis_url
        self._stores: list[TieredKVStore] = []
        self.now = 0.0

    def open(self, name: str, *, costs: Costs | None = None, cap_bytes: int = 64 * MIB) -> TieredKVStore:
        local = LocalKVStore(self._folder / name, LAYOUT, DiskLimits(cap_bytes))
        far: Any
        if self._kind == "directory":
            far = LocalKVStore(self._folder / "far", LAYOUT, DiskLimits(64 * MIB), several_machines=True)
        else:
            far = RedisKVStore(self._redis_url, LAYOUT, cap_bytes=64 * MIB)
        tier = SharedTier(self._kind, far)  # type: ignore[arg-type]
        pending = self._folder / f"{name}-pending"
        self._stores.append(TieredKVStore(local, [tier], pending, costs=costs, monotonic=lambda: self.now))
        return self._stores[-1]

    def close(self) -> None:
        for store in self._stores:
            store.close()


@pytest.fixture(params=["directory", "redis"])
def machines(request: pytest.FixtureRequest, tmp_path: Path, redis_url: str) -> Iterator[Machines]:
    machines = Machines(tmp_path, request.param, redis_url)
    yield machines
    machines.close()


@pytest.fixture
def redis_machines(tmp_path: Path, redis_url: str) -> Iterator[Machines]:
    machines = Machines(tmp_path, "redis", redis_url)
    yield machines
    machines.close()


def test_another_machine_reads_it_and_has_it_then(machines: Machines) -> None:
    one, two = machines.open("one"), machines.open("two")
    store_chain(one, LINKS)
    one.attach(LINKS, "doc", ttl_s=None, pinned=False)
    one.drain()
    assert two.match(LINKS) == 4
    reader = two.open_reader(LINKS)
    assert reader.tier == "shared"
    assert_right(reader, LINKS)
    reader.close()
    assert two.counters.get("decisions", "loaded_shared") == 1
    assert two.counters.get("hits", "shared") == 4
    assert two.counters.get("read_bytes", "shared") == LAYOUT.num_layers * sum(map(layer_bytes, LINKS))
    two.drain()
    assert two.local.match(LINKS) == 4
    reader = two.open_reader(LINKS)
    assert reader.tier == "disk"
    assert_right(reader, LINKS)
    reader.close()
    assert two.local.release("doc") == full_bytes(LINKS), "its holders came along"


def layer_bytes(segment: Any) -> int:
    return LAYOUT.layer_bytes(segment.num_tokens)


def test_segments_from_here_and_there_make_one_chain(machines: Machines) -> None:
    one, two = machines.open("one"), machines.open("two")
    store_chain(one, LINKS[:1])
    store_chain(one, LINKS[:3], first=2, owner="third")
    one.drain()
    store_chain(two.local, LINKS[:2], first=1)
    store_chain(two.local, LINKS, first=3, owner="fourth")
    assert two.local.match(LINKS) == 0
    assert two.match(LINKS) == 4
    reader = two.open_reader(LINKS)
    assert_right(reader, LINKS)
    reader.close()
    two.drain()
    assert two.local.match(LINKS) == 4


def test_a_tier_that_is_slower_than_computing_is_not_used(machines: Machines) -> None:
    costs = Costs()
    one, two = machines.open("one"), machines.open("two", costs=costs)
    store_chain(one, LINKS)
    one.drain()
    costs.computed(1_000_000, 1.0)
    costs.loaded(two.shared[0].name, 1000, 1.0)
    assert two.match(LINKS) == 0
    store_chain(two, LINKS)
    assert two.counters.get("decisions", "shared_too_slow") == 1
    assert two.counters.get("decisions", "loaded_shared") == 0
    assert two.match(LINKS) == 4


def test_a_release_is_everywhere(machines: Machines) -> None:
    one, two = machines.open("one"), machines.open("two")
    store_chain(one, LINKS)
    one.attach(LINKS, "doc", ttl_s=None, pinned=False)
    one.drain()
    assert two.match(LINKS) == 4
    assert one.release("doc") == full_bytes(LINKS)
    assert two.match(LINKS) == one.match(LINKS) == 0


def test_what_is_damaged_there_is_a_miss(machines: Machines, tmp_path: Path, server: RedisServer) -> None:
    one, two = machines.open("one"), machines.open("two")
    store_chain(one, LINKS)
    one.drain()
    for path in (tmp_path / "far" / "blocks").glob(f"{LINKS[2].key}-*"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    for name in server.client.keys(f"{PREFIX}part:*"):
        server.client.set(name, b"x" * server.client.strlen(name))
    reader = two.open_reader(LINKS)
    with pytest.raises(KVMissing):
        assert_right(reader, LINKS)
    reader.close()
    two.drain()
    assert two.match(LINKS) < 4
    assert two.local.match(LINKS) == 0


def test_a_redis_that_fails_is_left_alone_and_comes_back(redis_machines: Machines, server: RedisServer) -> None:
    one, two = redis_machines.open("one"), redis_machines.open("two")
    store_chain(one, LINKS)
    one.attach(LINKS, "doc", ttl_s=None, pinned=False)
    one.drain()
    reader = two.open_reader(LINKS)
    reader.read_layer(0)
    server.kill()
    with pytest.raises(KVMissing, match="failed"):
        reader.read_layer(3)
    reader.close()
    assert two.counters.get("shared_errors", "redis") == 1
    assert two.match(LINKS) == 0, "without waiting for Redis"
    assert two.counters.get("shared_errors", "redis") == 1
    store_chain(two, LINKS[:2])
    assert two.match(LINKS) == 2
    one.release("doc")
    server.start()  # its log remembers
    redis_machines.now += LEFT_ALONE_S
    assert two.match(LINKS) == 4, "the release was not heard"
    one.sweep_shared()
    assert two.match(LINKS) == 2


def test_a_redis_that_was_never_there_costs_nothing_but_the_tier(tmp_path: Path) -> None:
    machines = Machines(tmp_path, "redis", "redis://127.0.0.1:1/0")
    store = machines.open("one")
    store_chain(store, LINKS)
    store.attach(LINKS, "doc", ttl_s=None, pinned=False)
    reader = store.open_reader(LINKS)
    assert_right(reader, LINKS)
    reader.close()
    assert store.release("doc") == full_bytes(LINKS)
    assert store.counters.get("shared_errors", "redis") >= 1
    machines.close()


def test_a_pin_set_by_the_api_reaches_the_shared_tier(machines: Machines) -> None:
    one, two = machines.open("one"), machines.open("two")
    store_chain(one, LINKS)
    one.attach(LINKS, "doc", ttl_s=None, pinned=False)
    one.drain()
    one.local.catalog.set_policy("doc", ttl_s=5.0, pinned=True)  # as another process of that machine does
    assert ("doc", None, False) in two.shared[0].store.holders_of([LINKS[0].key])
    one.sweep_shared()
    assert two.shared[0].store.holders_of([LINKS[0].key]) == [("doc", 5.0, True)]


def test_closing_does_not_wait_for_a_long_copy(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machines.open("one")
    far = one.shared[0].store
    writing, closed = threading.Event(), threading.Event()
    open_writer = far.open_writer

    def held_back(*arguments: Any, **options: Any) -> Any:
        writer = open_writer(*arguments, **options)
        writing.set()
        closed.wait(30)
        return writer

    monkeypatch.setattr(far, "open_writer", held_back)
    store_chain(one, LINKS)
    assert writing.wait(30)
    closer = threading.Thread(target=one.close)
    closer.start()
    while not one._closing.is_set():
        time.sleep(0.001)
    closed.set()
    closer.join(30)
    two = machines.open("two")
    assert two.match(LINKS) == 0
    assert two.shared[0].store.stored_bytes == 0  # type: ignore[attr-defined]


def test_costs_are_learnt_and_forgotten() -> None:
    now = [0.0]
    costs = Costs(clock=lambda: now[0])
    assert costs.worth_loading("redis", 10**9, 1), "nothing is known yet"
    costs.computed(1000, 1.0)
    assert costs.worth_loading("redis", 10**9, 1)
    costs.loaded("redis", 10**6, 1.0)
    assert costs.worth_loading("redis", 10**6, 1001)
    assert not costs.worth_loading("redis", 10**6, 999)
    assert costs.worth_loading("directory", 10**9, 1)
    costs.loaded("redis", 10**8, 1.0)
    assert costs.worth_loading("redis", 10**7, 999)
    costs.loaded("redis", 1, 1.0)
    costs.loaded("redis", 1, 1.0)
    costs.loaded("redis", 1, 1.0)
    assert not costs.worth_loading("redis", 10**8, 999)
    now[0] += 601
    assert costs.worth_loading("redis", 10**8, 999), "it may have recovered"
