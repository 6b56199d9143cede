"""Two real processes at work on one folder at the same time."""

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.kv_store import LocalKVStore
from engine.kv_store.index import Index
from tests.contracts.kv_store_contract import full_bytes
from tests.kv_store.kv_data import assert_right, chain

# Waits for the other one, then stores the same chain, from the first layer to the commit, and reads it back.
SAME_KEY = """
import sys
from pathlib import Path
from engine.kv_store import DiskLimits, LocalKVStore
from tests.contracts.kv_store_contract import full_bytes
from tests.kv_store.kv_data import LAYOUT, assert_right, chain, store_chain

store = LocalKVStore(Path(sys.argv[1]), LAYOUT, DiskLimits(2 * full_bytes(chain(5 * 4096))))
for seed in range(4):
    print("ready", flush=True)
    sys.stdin.readline()
    links = chain(5 * 4096, seed=seed)
    store_chain(store, links, owner=f"{sys.argv[2]} {seed}")
    reader = store.open_reader(links)
    assert_right(reader, links)
    reader.close()
    print("done", flush=True)
    sys.stdin.readline()
    store.release("holder")
store.close()
"""


@pytest.mark.timeout(120)
def test_two_processes_write_the_same_key(store: LocalKVStore, folder: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SAME_KEY, str(folder), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]

    def both(say: str) -> None:
        for process in children:
            assert process.stdout is not None
            assert process.stdout.readline() == say, process.stderr.read() if process.stderr else ""

    def go_on() -> None:
        for process in children:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    try:
        for seed in range(4):
            both("ready\n")
            go_on()
            both("done\n")
            links = chain(5 * 4096, seed=seed)
            assert store.stored_bytes == full_bytes(links)
            assert sum(path.stat().st_size for path in (folder / "blocks").iterdir()) == full_bytes(links)
            reader = store.open_reader(links)
            assert_right(reader, links)
            reader.close()
            store.attach(links, "holder", ttl_s=None, pinned=False)
            store.release("holder")
            go_on()
        for process in children:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
    finally:
        for process in children:
            process.kill()
            process.communicate()


def test_opening_waits_while_another_makes_the_index(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite3"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.3, other.rollback).start()
    with Index(path, tmp_path / "sessions").transaction() as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()
