"""A folder that was written under another layout: regrouped files are read, other contents are a miss."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import KVMissing
from engine.interfaces import KVLayout
from engine.kv_store import DiskLimits, LocalKVStore
from engine.kv_store.layout import segment_file_bytes
from tests.kv_store.conftest import CAP_BYTES
from tests.kv_store.kv_data import LAYOUT, assert_right, chain, store_chain, write_layers

LINKS = chain(2 * 4096 + 100)


@pytest.fixture
def other(request: pytest.FixtureRequest, folder: Path) -> Iterator[LocalKVStore]:
    store = LocalKVStore(folder, request.param, DiskLimits(CAP_BYTES))
    yield store
    store.close()


@pytest.mark.parametrize("other", [replace(LAYOUT, layers_per_group=count) for count in (1, 3, 5)], indirect=True)
def test_another_grouping_is_read(store: LocalKVStore, other: LocalKVStore) -> None:
    store_chain(store, LINKS)
    assert other.match(LINKS) == 3
    reader = other.open_reader(LINKS)
    assert_right(reader, LINKS)
    reader.close()


@pytest.mark.parametrize("other", [replace(LAYOUT, layers_per_group=1)], indirect=True)
def test_unfinished_work_of_another_grouping_is_not_taken_up(store: LocalKVStore, other: LocalKVStore) -> None:
    writer = store.open_writer(LINKS, first=0, owner="job")
    write_layers(writer, LINKS, range(4))
    writer.suspend()
    again = other.open_writer(LINKS, first=0, owner="job")
    assert again.groups_done() == 0
    write_layers(again, LINKS, range(5))
    again.commit()
    assert other.stored_bytes == sum(segment_file_bytes(other.layout, segment.num_tokens) for segment in LINKS)


@pytest.mark.parametrize("other", [KVLayout(5, 3, 2), KVLayout(4, 2, 2)], ids=["size", "layers"], indirect=True)
def test_other_contents_under_the_same_key_are_replaced(store: LocalKVStore, other: LocalKVStore) -> None:
    store_chain(store, LINKS)
    assert other.match(LINKS) == 0
    with pytest.raises(KVMissing):
        other.open_reader(LINKS)
    store_chain(other, LINKS)
    reader = other.open_reader(LINKS)
    assert_right(reader, LINKS, other.layout)
    reader.close()
    assert store.match(LINKS) == 0
    assert other.counters.get("evictions", "disk", "layout") == 3
