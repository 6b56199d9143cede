"""KV encrypted at rest: nothing readable on the disk, keys can change, a missing or wrong key is a miss."""

import base64
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import KVCorrupt, KVMissing, KVSealed
from engine.interfaces import KVLayout
from engine.kv_store import DiskLimits, Keyring, LocalKVStore
from engine.kv_store.group_file import PLAIN, SEALED, GroupFile
from engine.kv_store.layout import ALIGNMENT
from engine.kv_store.redis_tier import PREFIX, RedisKVStore
from engine.kv_store.sealing import key_id
from loadtests.redis_server import RedisServer
from tests.contracts.kv_store_contract import (
    CapContract,
    KVStoreContract,
    LeaseContract,
    OpenStore,
    UnfinishedWorkContract,
)
from tests.kv_store.conftest import MakeStore
from tests.kv_store.kv_data import LAYOUT, assert_right, chain, payload, store_chain, write_layers

OLD, NEW = bytes(range(32)), bytes(range(1, 33))
LINKS = chain(2 * 4096 + 100)
MIB = 1024**2


class TestSealedStore(KVStoreContract, CapContract, UnfinishedWorkContract, LeaseContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Iterator[OpenStore]:
        stores: list[LocalKVStore] = []

        def open_one(*, cap_bytes: int = 64 * MIB, **options: Any) -> LocalKVStore:
            stores.append(LocalKVStore(tmp_path, LAYOUT, DiskLimits(cap_bytes), keyring=Keyring([NEW]), **options))
            return stores[-1]

        yield open_one
        for store in stores:
            store.close()


def read(store: LocalKVStore) -> None:
    reader = store.open_reader(LINKS)
    try:
        assert_right(reader, LINKS)
    finally:
        reader.close()


def test_nothing_readable_lies_on_the_disk(make_store: MakeStore, folder: Path) -> None:
    store = make_store(keyring=Keyring([NEW]))
    store_chain(store, LINKS)
    read(store)
    stored = b"".join(path.read_bytes() for path in (folder / "blocks").iterdir())
    for segment in LINKS:
        for layer in range(LAYOUT.num_layers):
            assert payload(segment, layer)[:64] not in stored
    assert stored.count(key_id(NEW)) == len(LINKS) * LAYOUT.num_groups
    assert NEW not in stored


def test_the_same_kv_is_never_sealed_alike(make_store: MakeStore, folder: Path) -> None:
    def layer() -> bytes:
        store = make_store(keyring=Keyring([NEW]))
        store_chain(store, LINKS)
        path = next(iter(sorted((folder / "blocks").glob(f"{LINKS[0].key}-*-000.kv"))))
        data = path.read_bytes()[ALIGNMENT : ALIGNMENT + LAYOUT.layer_bytes(4096)]
        store.catalog.evict(size_bytes=2**40)
        return data

    assert layer() != layer()


def test_a_key_is_changed_by_a_new_first_line(make_store: MakeStore, tmp_path: Path) -> None:
    store_chain(make_store(keyring=Keyring([OLD])), LINKS[:2])
    path = tmp_path / "keys"
    path.write_text(
        f"# since May\n{base64.b64encode(NEW).decode()}\n\n{base64.b64encode(OLD).decode()}  # before\n", "ascii"
    )
    store = make_store(keyring=Keyring.load(path))
    store_chain(store, LINKS, first=2)
    read(store)
    assert store.counters.get("key_misses") == 0
    with pytest.raises(KVMissing):
        read(make_store(keyring=Keyring([OLD])))


@pytest.mark.parametrize("keyring", [None, Keyring([OLD])], ids=["no key", "another key"])
def test_without_its_key_it_is_a_miss(keyring: Keyring | None, make_store: MakeStore) -> None:
    store_chain(make_store(keyring=Keyring([NEW])), LINKS)
    store = make_store(keyring=keyring)
    assert store.match(LINKS) == 3
    with pytest.raises(KVMissing, match=f"sealed with key {key_id(NEW).hex()}"):
        read(store)
    assert store.counters.get("key_misses") >= 1
    assert store.counters.get("checksum_failures") == 0
    assert store.match(LINKS) < 3
    for _ in LINKS:
        store_chain(store, LINKS, first=store.match(LINKS))
        try:
            read(store)
        except KVMissing:
            continue
        return
    raise AssertionError("it never became readable")


def test_plain_kv_stays_readable_with_a_key(make_store: MakeStore) -> None:
    store_chain(make_store(), LINKS)
    read(make_store(keyring=Keyring([NEW])))


def test_checking_needs_no_key(make_store: MakeStore, folder: Path) -> None:
    store_chain(make_store(keyring=Keyring([NEW])), LINKS)
    catalog = make_store().catalog
    assert catalog.verify().ok
    path = next(iter((folder / "blocks").glob(f"{LINKS[1].key}-*-001.kv")))
    data = bytearray(path.read_bytes())
    data[ALIGNMENT + 5] ^= 1
    path.write_bytes(data)
    assert [bad.group for bad in catalog.verify().bad] == [1]


def test_a_layer_opens_in_its_own_place_only() -> None:
    ring, layout = Keyring([NEW]), KVLayout(num_layers=4, bytes_per_token=2, layers_per_group=4)
    here = GroupFile(LINKS[0].key, 0, 4096, 0, layout)
    seal, data = ring.new_seal(), secrets.token_bytes(here.layer_bytes)
    stored, entry = here.encode_layer(1, data, ring, seal)
    header = here.decode_header(here.encode_header([entry] * 4, seal))
    assert here.decode_layer(1, stored, header, ring) == data
    with pytest.raises(KVCorrupt, match="does not open"):
        here.decode_layer(2, stored, header, ring)
    for other in (GroupFile(LINKS[1].key, 0, 4096, 0, layout), GroupFile(LINKS[0].key, 4096, 8192, 0, layout)):
        with pytest.raises(KVCorrupt, match="does not open"):
            other.decode_layer(1, stored, other.decode_header(other.encode_header([entry] * 4, seal)), ring)
    with pytest.raises(KVSealed):
        here.decode_layer(1, stored, header, Keyring([OLD]))
    assert (PLAIN, SEALED) == (1, 2), "what is on disks today"


def test_redis_holds_nothing_readable(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        store = RedisKVStore(server.url, LAYOUT, cap_bytes=64 * MIB, keyring=Keyring([NEW]))
        store_chain(store, LINKS)
        reader = store.open_reader(LINKS)
        assert_right(reader, LINKS)
        reader.close()
        stored = b"".join(server.client.get(name) for name in server.client.keys(f"{PREFIX}part:*"))
        assert payload(LINKS[0], 0)[:64] not in stored
        other = RedisKVStore(server.url, LAYOUT, cap_bytes=64 * MIB)
        reader = other.open_reader(LINKS)
        with pytest.raises(KVMissing, match="sealed with key"):
            reader.read_layer(0)
        reader.close()
        assert other.counters.get("key_misses") == 1
        store.close()
        other.close()


@pytest.mark.parametrize("text", ["", "# none\n", "not base64!\n", base64.b64encode(b"short").decode()])
def test_bad_key_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(text, "ascii")
    with pytest.raises(ValueError, match="key"):
        Keyring.load(path)


def test_files_with_too_many_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="121 layers a file"):
        LocalKVStore(tmp_path, KVLayout(130, 2, 121), DiskLimits(MIB), keyring=Keyring([NEW]))


def test_a_resume_goes_on_under_another_key(make_store: MakeStore) -> None:
    writer = make_store(keyring=Keyring([OLD])).open_writer(LINKS, first=0, owner="job")
    write_layers(writer, LINKS, range(3))
    writer.suspend()
    store = make_store(keyring=Keyring([NEW, OLD]))
    again = store.open_writer(LINKS, first=0, owner="job")
    assert again.groups_done() == 1
    write_layers(again, LINKS, range(2, 5))
    again.commit()
    read(store)
