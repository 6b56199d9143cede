"""Opening a folder after whatever happened: leftovers go, what is sound stays."""

import secrets
import sqlite3
import time
from pathlib import Path

import pytest

from engine.errors import KVError
from engine.kv_store import DiskLimits, KVCatalog
from engine.kv_store.blocks import BlockFolder
from engine.kv_store.copies import Copy
from engine.kv_store.index import SCHEMA_VERSION, insert_copy
from engine.kv_store.layout import group_file_bytes
from tests.contracts.kv_store_contract import Clock, full_bytes
from tests.kv_store.conftest import CAP_BYTES, MakeStore
from tests.kv_store.kv_data import LAYOUT, assert_right, chain, store_chain, write_layers

LINKS = chain(2 * 4096)


def test_files_that_nobody_knows_are_removed(make_store: MakeStore, folder: Path) -> None:
    store = make_store()
    store_chain(store, LINKS)
    known = sorted((folder / "blocks").iterdir())
    copy = secrets.token_hex(8)
    for name in ("notes.txt", f"{LINKS[0].key}-{copy}-000.kv", f"{LINKS[0].key}-{copy}-001.tmp"):
        (folder / "blocks" / name).write_bytes(b"left behind")
    make_store()
    assert sorted((folder / "blocks").iterdir()) == known


def test_temporary_files_of_live_writers_stay(make_store: MakeStore, folder: Path) -> None:
    writer = make_store().open_writer(LINKS, first=0, owner="job")
    write_layers(writer, LINKS, range(3))
    writer.flush()
    assert len(list((folder / "blocks").glob("*.tmp"))) == 2
    store = make_store()
    write_layers(writer, LINKS, range(3, 5))
    writer.commit()
    reader = store.open_reader(LINKS)
    assert_right(reader, LINKS)
    reader.close()


@pytest.mark.parametrize("damage", ["removed", "truncated", "empty"])
def test_segments_with_lost_or_short_files_do_not_match(damage: str, make_store: MakeStore, folder: Path) -> None:
    store_chain(make_store(), LINKS)
    path = next((folder / "blocks").glob(f"{LINKS[1].key}-*-001.kv"))
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:5000] if damage == "truncated" else b"")
    store = make_store()
    assert store.match(LINKS) == 1
    assert store.stored_bytes == full_bytes(LINKS[:1])
    assert len(list((folder / "blocks").iterdir())) == 3


def test_orphans_are_kept_for_their_owner_for_a_time(make_store: MakeStore, folder: Path) -> None:
    clock = Clock()
    store = make_store(clock=clock, orphan_ttl_s=100.0)
    writer = store.open_writer(LINKS, first=0, owner="job")
    write_layers(writer, LINKS, range(3))
    clock.now += 1000  # a long prefill: its age counts from its last sign of life
    write_layers(writer, LINKS, range(3, 4))
    writer.flush()
    writer.suspend()
    clock.now += 99
    assert make_store(clock=clock, orphan_ttl_s=100.0).stored_bytes == 4 * group_file_bytes(LAYOUT, 4096, 0)
    clock.now += 2
    assert make_store(clock=clock, orphan_ttl_s=100.0).stored_bytes == 0
    assert list((folder / "blocks").iterdir()) == []


def test_discard_drops_the_work_of_a_suspended_owner(make_store: MakeStore, catalog: KVCatalog, folder: Path) -> None:
    store = make_store()
    for owner in ("job", "other"):
        writer = store.open_writer(LINKS, first=0, owner=owner)
        write_layers(writer, LINKS, range(2))
        writer.suspend()
    assert catalog.unfinished() == {"job", "other"}
    assert catalog.discard("job") == 2 * group_file_bytes(LAYOUT, 4096, 0)
    assert catalog.discard("job") == 0
    assert store.open_writer(LINKS, first=0, owner="other").groups_done() == 1


def test_a_lowered_cap_is_reached_by_evicting(make_store: MakeStore) -> None:
    clock = Clock()
    docs = [chain(4096, seed=seed) for seed in range(4)]
    store = make_store(clock=clock)
    for links in docs:
        clock.now += 1
        store_chain(store, links)
    smaller = make_store(cap_bytes=2 * full_bytes(docs[0]), clock=clock)
    assert [smaller.match(links) for links in docs] == [0, 0, 1, 1]
    assert smaller.stored_bytes == 2 * full_bytes(docs[0])


def test_a_damaged_index_is_put_aside(folder: Path, make_store: MakeStore) -> None:
    store = make_store()
    store_chain(store, LINKS)
    store.close()
    (folder / "index.sqlite3").write_bytes(b"not a database" * 1000)
    store = make_store()
    assert store.match(LINKS) == 0
    assert list((folder / "blocks").iterdir()) == []
    assert len(list(folder.glob("index.sqlite3.damaged-*"))) == 1
    store_chain(store, LINKS)


def test_an_index_of_another_version_is_refused(folder: Path, make_store: MakeStore) -> None:
    make_store().close()
    db = sqlite3.connect(folder / "index.sqlite3")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(KVError, match=f"format 99, expected {SCHEMA_VERSION}"):
        make_store()


def test_a_folder_of_ten_thousand_files_opens_quickly(folder: Path) -> None:
    blocks = BlockFolder(folder / "blocks")
    catalog = KVCatalog(folder, DiskLimits(2**40))
    size_bytes = full_bytes(chain(1))
    with catalog.index.transaction() as db:
        for number in range(10_002 // 3):
            copy = Copy(f"{number:016x}", f"{number:064x}", 0, 1, LAYOUT, size_bytes)
            insert_copy(db, copy, "job", catalog.session, 0.0)
            for block in copy.blocks:
                with blocks.path(copy, block.group).open("wb") as file:
                    file.truncate(block.size_bytes)
        db.execute("UPDATE copies SET state = 'stored', owner = NULL, session = NULL")
    catalog.close()
    started = time.perf_counter()
    catalog = KVCatalog(folder, DiskLimits(2**40))
    seconds = time.perf_counter() - started
    assert catalog.entries()[0].num_segments == 3334
    catalog.close()
    assert seconds < 5.0  # about 0.2 s on two quiet cores


def test_a_catalog_needs_no_layout(store: None, folder: Path) -> None:
    catalog = KVCatalog(folder, DiskLimits(CAP_BYTES))
    assert catalog.usage() == {"disk": 0, "host": 0}
    catalog.close()
    catalog.close()
