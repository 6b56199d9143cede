"""Damage of every kind to stored files: a miss, counted, never served, and gone afterwards."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import KVMissing
from engine.kv_store import KVCatalog, LocalKVStore
from engine.kv_store.layout import ALIGNMENT
from tests.kv_store.conftest import MakeStore
from tests.kv_store.kv_data import LAYOUT, assert_right, chain, payload, store_chain

LINKS = chain(2 * 4096 + 100)
LAYER_BYTES = LAYOUT.layer_bytes(4096)


def files_of(folder: Path, segment: int) -> list[Path]:
    """The group files of one segment of LINKS, by group."""
    return sorted((folder / "blocks").glob(f"{LINKS[segment].key}-*.kv"))


def flip(offset: int, bit: int = 0) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1 << bit
        path.write_bytes(data)

    return damage


def cut_to(size: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[:size])


DAMAGES = {
    "magic": flip(0),
    "version": flip(8),
    "token range": flip(16, bit=3),
    "layer range": flip(32),
    "bytes a token": flip(40),
    "key": flip(60),
    "first layer's checksum": flip(84),
    "second layer's checksum": flip(100, bit=7),
    "unused part of the header": flip(2000),
    "header's checksum": flip(ALIGNMENT - 1),
    "first payload byte": flip(ALIGNMENT),
    "end of the first layer": flip(ALIGNMENT + LAYER_BYTES - 1, bit=5),
    "start of the second layer": flip(ALIGNMENT + LAYER_BYTES),
    "last byte": flip(ALIGNMENT + 2 * LAYER_BYTES - 1),
    "empty": cut_to(0),
    "half a header": cut_to(ALIGNMENT // 2),
    "header only": cut_to(ALIGNMENT),
    "one byte short": cut_to(ALIGNMENT + 2 * LAYER_BYTES - 1),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "all zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "zeroed page": lambda path: path.write_bytes(
        path.read_bytes()[:ALIGNMENT] + bytes(4096) + path.read_bytes()[ALIGNMENT + 4096 :]
    ),
}


def read_until_missing(store: LocalKVStore) -> list[int]:
    """Layers served, each checked byte by byte, before the reader says that something is missing."""
    reader = store.open_reader(LINKS)
    served = []
    try:
        for layer in range(LAYOUT.num_layers):
            buffers = reader.read_layer(layer)
            assert [bytes(buffer) for buffer in buffers] == [payload(segment, layer) for segment in LINKS]
            served.append(layer)
    except KVMissing:
        pass
    finally:
        reader.close()
    return served


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_a_miss_and_is_removed(damage: Callable[[Path], None], store: LocalKVStore, folder: Path) -> None:
    store_chain(store, LINKS)
    damage(files_of(folder, 1)[1])
    assert read_until_missing(store) in ([0, 1], [0, 1, 2])  # the damaged group holds layers 2 and 3
    assert store.counters.get("checksum_failures") >= 1
    assert store.match(LINKS) == 1
    assert files_of(folder, 1) == []
    store_chain(store, LINKS, first=1)
    assert read_until_missing(store) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("layer", range(5))
def test_a_flip_in_any_layer_stops_at_that_layer(layer: int, store: LocalKVStore, folder: Path) -> None:
    store_chain(store, LINKS)
    group, position = divmod(layer, LAYOUT.layers_per_group)
    flip(ALIGNMENT + position * LAYER_BYTES + 17)(files_of(folder, 0)[group])
    assert read_until_missing(store) == list(range(layer))
    assert store.match(LINKS) == 0


def test_swapped_files_are_noticed(store: LocalKVStore, folder: Path) -> None:
    store_chain(store, LINKS)
    one, two = files_of(folder, 0)[0], files_of(folder, 1)[0]
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert read_until_missing(store) == []
    assert store.match(LINKS) == 0


def test_groups_swapped_within_a_segment_are_noticed(store: LocalKVStore, folder: Path) -> None:
    store_chain(store, LINKS)
    one, two, _ = files_of(folder, 0)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert read_until_missing(store) == []


def test_a_lost_file_is_a_miss_but_no_checksum_failure(store: LocalKVStore, folder: Path) -> None:
    store_chain(store, LINKS)
    files_of(folder, 2)[2].unlink()
    assert read_until_missing(store) == [0, 1, 2, 3]
    assert (store.counters.get("read_errors"), store.counters.get("checksum_failures")) == (1, 0)
    assert store.match(LINKS) == 2


def test_flips_in_the_padding_harm_nothing(store: LocalKVStore, folder: Path) -> None:
    store_chain(store, LINKS)
    path = files_of(folder, 2)[0]
    flip(ALIGNMENT + LAYOUT.layer_bytes(100) + 5)(path)
    assert read_until_missing(store) == [0, 1, 2, 3, 4]


def test_damage_behind_the_host_cache_is_not_served_either(make_store: MakeStore, folder: Path) -> None:
    store = make_store(host_bytes=1024**2)
    store_chain(store, LINKS)
    assert read_until_missing(store) == [0, 1, 2, 3, 4]
    for path in files_of(folder, 0):
        path.write_bytes(bytes(path.stat().st_size))
    reader = store.open_reader(LINKS)  # verified when it came into memory
    assert reader.tier == "host"
    assert_right(reader, LINKS)
    reader.close()


@pytest.mark.parametrize("host_bytes", [0, 1024**2])
def test_an_index_that_mixes_up_segments_is_noticed(host_bytes: int, make_store: MakeStore) -> None:
    store = make_store(host_bytes=host_bytes)
    store_chain(store, LINKS)
    assert read_until_missing(store) == [0, 1, 2, 3, 4]  # all of it is in memory now, if there is any
    with store.catalog.index.transaction() as db:
        for key, new in ((LINKS[0].key, "x"), (LINKS[1].key, LINKS[0].key), ("x", LINKS[1].key)):
            db.execute("UPDATE copies SET key = ? WHERE key = ?", (new, key))
    assert read_until_missing(store) == []
    assert store.counters.get("read_errors") >= 1


def test_verify_finds_removes_and_counts(store: LocalKVStore, catalog: KVCatalog, folder: Path) -> None:
    other = chain(4096, seed=5)
    store_chain(store, LINKS)
    store_chain(store, other)
    store.attach(LINKS, "doc", ttl_s=None, pinned=True)
    store.attach(other, "other", ttl_s=None, pinned=False)
    assert catalog.verify().ok
    flip(ALIGNMENT + 1)(files_of(folder, 1)[1])
    files_of(folder, 2)[0].unlink()
    assert catalog.verify("other").ok
    seen: list[tuple[int, int]] = []
    report = catalog.verify("doc", on_progress=lambda done, total: seen.append((done, total)))
    assert [(bad.copy.key, bad.group, bad.corrupt) for bad in report.bad] == [
        (LINKS[1].key, 1, True),
        (LINKS[2].key, 0, False),
    ]
    assert (report.num_segments, report.num_blocks) == (3, 9)
    assert seen[-1] == (report.size_bytes, report.size_bytes)
    assert (catalog.counters.get("checksum_failures"), catalog.counters.get("read_errors")) == (1, 1)
    assert store.match(LINKS) == 1
    assert catalog.verify().ok
