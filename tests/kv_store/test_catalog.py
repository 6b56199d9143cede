"""What `foreword cache` and the API process see and do, without reading or writing KV."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kv_store import CacheEntry, KVCatalog, LocalKVStore
from service.local_kv import LocalKV
from tests.contracts.kv_store_contract import Clock, full_bytes
from tests.kv_store.conftest import MakeStore
from tests.kv_store.kv_data import LAYOUT, chain, store_chain

A, B = chain(3 * 4096, seed=1, shared=4096), chain(2 * 4096, seed=2, shared=4096)


@pytest.fixture
def two_documents(store: LocalKVStore) -> LocalKVStore:
    for name, links in (("a", A), ("b", B)):
        store_chain(store, links, owner=name, first=store.match(links))
        store.attach(links, name, ttl_s=None, pinned=False)
    return store


def test_describe_counts_shared_segments_for_each_holder(two_documents: LocalKVStore, catalog: KVCatalog) -> None:
    assert catalog.describe("a") == {"disk": full_bytes(A), "host": 0}
    assert catalog.describe("b") == {"disk": full_bytes(B), "host": 0}
    assert catalog.describe("nobody") == {"disk": 0, "host": 0}
    assert catalog.usage() == {"disk": full_bytes(A) + full_bytes(B[1:]), "host": 0}
    assert catalog.stored_bytes == full_bytes(A) + full_bytes(B[1:])


def test_many_holders_are_described_as_each_of_them(make_store: MakeStore, catalog: KVCatalog) -> None:
    store = make_store(host_bytes=2**20)
    for name, links in (("a", A), ("b", B)):
        store_chain(store, links, owner=name, first=store.match(links))
        store.attach(links, name, ttl_s=None, pinned=False)
    reader = store.open_reader(B)
    for layer in range(5):
        reader.read_layer(layer)
    reader.close()
    described = LocalKV(catalog).describe(["a", "b", "nobody"])
    assert described == {holder: catalog.describe(holder) for holder in ("a", "b", "nobody")}
    assert described["b"]["host"] > 0


def test_host_memory_of_the_worker_is_seen_from_outside(make_store: MakeStore, catalog: KVCatalog) -> None:
    store = make_store(host_bytes=2**20)
    store_chain(store, A)
    store.attach(A, "a", ttl_s=None, pinned=False)
    reader = store.open_reader(A)
    for layer in range(5):
        reader.read_layer(layer)
    reader.close()
    content = 5 * sum(LAYOUT.layer_bytes(segment.num_tokens) for segment in A)
    assert catalog.describe("a") == {"disk": full_bytes(A), "host": content}
    assert catalog.usage()["host"] == content
    catalog.release("a")
    store.sweep()
    assert catalog.usage() == {"disk": 0, "host": 0}
    store_chain(store, A)
    assert store.open_reader(A).tier == "disk"


def test_entries(make_store: MakeStore, catalog: KVCatalog) -> None:
    clock = Clock()
    store = make_store(clock=clock)
    store_chain(store, A)
    store.attach(A, "a", ttl_s=60.0, pinned=False)
    clock.now += 10
    reader = store.open_reader(A[:1])
    store_chain(store, chain(100, seed=9))
    clock.now += 10
    store.attach(chain(200, seed=10), "gone", ttl_s=None, pinned=True)
    assert sorted(catalog.entries(), key=lambda entry: entry.holder or "") == [
        CacheEntry(None, 1, 100, full_bytes(chain(100, seed=9)), 0, False, None, clock.now - 10, False),
        CacheEntry("a", 3, 3 * 4096, full_bytes(A), 0, False, clock.now + 50, clock.now - 10, True),
        CacheEntry("gone", 0, 0, 0, 1, True, None, None, False),
    ]
    reader.close()


def test_evicting_a_holder_leaves_what_others_hold(two_documents: LocalKVStore, catalog: KVCatalog) -> None:
    assert catalog.evict(holder="a") == full_bytes(A[1:])
    assert (two_documents.match(A), two_documents.match(B)) == (1, 2)
    assert catalog.counters.get("evictions", "disk", "requested") == 2
    store_chain(two_documents, A, first=1)
    assert catalog.release("a") == full_bytes(A[1:])  # the holder was still there


def test_evicting_bytes_takes_what_is_needed(two_documents: LocalKVStore, catalog: KVCatalog) -> None:
    size = full_bytes(A[:1])
    assert catalog.evict(size_bytes=size + 1) == 2 * size
    assert catalog.evict(size_bytes=2**40) == 2 * size
    assert catalog.stored_bytes == 0
    for wrong in ({}, {"holder": "a", "size_bytes": 1}):
        with pytest.raises(ValueError, match="either"):
            catalog.evict(**wrong)


def test_pin_keeps_from_eviction_until_unpinned(two_documents: LocalKVStore, catalog: KVCatalog) -> None:
    catalog.pin("a")
    assert catalog.evict(size_bytes=2**40) == full_bytes(B[1:])
    assert catalog.evict(holder="a") == 0
    catalog.pin("a", False)
    assert catalog.evict(holder="a") == full_bytes(A[1:])


def test_pin_leaves_the_ttl(make_store: MakeStore) -> None:
    clock = Clock()
    store = make_store(clock=clock)
    store_chain(store, A)
    store.attach(A, "a", ttl_s=10.0, pinned=False)
    store.catalog.pin("a")
    clock.now += 100
    assert store.match(A) == 3
    store.catalog.pin("a", False)  # also a sign of life
    clock.now += 9
    assert store.match(A) == 3
    clock.now += 2
    assert store.match(A) == 0


def test_attaching_before_the_prefill_protects_what_it_builds_on(two_documents: LocalKVStore) -> None:
    longer = chain(3 * 4096, seed=3, shared=4096)
    two_documents.attach(longer, "c", ttl_s=None, pinned=False)
    two_documents.release("a")
    two_documents.release("b")
    assert two_documents.match(longer) == 1


@pytest.mark.parametrize("ttl_s", [-1.0, float("nan")])
def test_an_impossible_ttl_is_refused(ttl_s: float, catalog: KVCatalog) -> None:
    with pytest.raises(ValueError, match="TTL"):
        catalog.set_policy("a", ttl_s=ttl_s, pinned=False)


def test_importing_the_store_loads_no_torch() -> None:
    code = "import sys, engine.kv_store; print([m for m in ('torch', 'transformers', 'redis') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.stdout == "[]\n", done.stderr


def test_the_folder_is_private(store: LocalKVStore, folder: Path) -> None:
    store_chain(store, A)
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder / "blocks").iterdir())
