"""kill -9 of real processes: whatever they were doing, the folder is sound afterwards and nothing wrong is served."""

import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.errors import StorageFull
from engine.kv_store import LocalKVStore
from engine.kv_store.layout import segment_file_bytes
from tests.contracts.kv_store_contract import full_bytes
from tests.kv_store.conftest import MakeStore
from tests.kv_store.crashing_child import DOCUMENTS, document
from tests.kv_store.kv_data import LAYOUT, assert_right, chain, store_chain, write_layers

CAP_BYTES = 7 * segment_file_bytes(LAYOUT, 4096)  # of the 12 segments that the children's documents have


StartChild = Callable[[int, int], subprocess.Popen[str]]


@pytest.fixture
def start_child(folder: Path) -> Iterator[StartChild]:
    """Starts crashing_child.py on the test's folder, given its seed and when to die."""
    children: list[subprocess.Popen[str]] = []

    def start(seed: int, die_at: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.kv_store.crashing_child", folder, CAP_BYTES, seed, die_at]
        pipe = subprocess.PIPE
        children.append(subprocess.Popen([str(part) for part in command], stdout=pipe, stderr=pipe, text=True))
        return children[-1]

    yield start
    for process in children:
        process.kill()
        process.communicate()


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "blocks").iterdir())


def assert_sound(store: LocalKVStore, folder: Path) -> None:
    """No other process is at work: files and index agree, and what matches is right."""
    assert list((folder / "blocks").glob("*.tmp")) == []
    assert file_bytes(folder) == store.stored_bytes <= CAP_BYTES
    assert len(list((folder / "sessions").iterdir())) == 1
    for number in range(len(DOCUMENTS)):
        links = document(number)
        links = links[: store.match(links)]
        reader = store.open_reader(links)
        assert_right(reader, links)
        reader.close()
    assert store.counters.get("checksum_failures") == store.counters.get("read_errors") == 0


# 4 × 3 rounds of two processes each: 24 kills at random points of opening, writing, publishing, evicting, removing.
@pytest.mark.parametrize("seed", range(4))
def test_two_processes_killed_at_random_points(
    seed: int, make_store: MakeStore, start_child: StartChild, folder: Path
) -> None:
    rng = random.Random(seed)
    for _ in range(3):
        children = [start_child(rng.randrange(2**30), rng.randint(150, 600)) for _ in range(2)]
        for process in children:
            output = process.communicate(timeout=60)
            assert process.returncode == -signal.SIGKILL, output
        store = make_store(cap_bytes=CAP_BYTES)
        assert_sound(store, folder)
        store.close()
    store = make_store(cap_bytes=CAP_BYTES)
    for number in range(len(DOCUMENTS)):  # go on where the killed left off
        links = document(number)
        first = store.match(links)
        writer = store.open_writer(links, first=first, owner=f"job {number}")
        start = min(writer.groups_done() * LAYOUT.layers_per_group, LAYOUT.num_layers)
        write_layers(writer, links[first:], range(start, LAYOUT.num_layers))
        writer.commit()
        reader = store.open_reader(links)
        assert_right(reader, links)
        reader.close()
        assert_sound(store, folder)


def test_the_leases_of_a_killed_process_end(make_store: MakeStore, start_child: StartChild) -> None:
    store = make_store(cap_bytes=CAP_BYTES)
    links = document(0)
    store_chain(store, links)
    process = start_child(0, 0)
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    big = chain(7 * 4096, seed=77)
    with pytest.raises(StorageFull) as raised:
        store.open_writer(big, first=0, owner="big")
    assert raised.value.available_bytes == CAP_BYTES - full_bytes(links)
    process.kill()
    process.communicate(timeout=60)
    store_chain(store, big)
    assert store.match(big) == 7


def test_a_release_that_waited_for_a_killed_reader_is_finished(
    make_store: MakeStore, start_child: StartChild, folder: Path
) -> None:
    store = make_store(cap_bytes=CAP_BYTES)
    links = document(0)
    store_chain(store, links)
    store.attach(links, "doc", ttl_s=None, pinned=False)
    process = start_child(0, 0)
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    assert store.release("doc") == 0
    assert store.sweep() == 0
    process.kill()
    process.communicate(timeout=60)
    assert store.sweep() == full_bytes(links)
    assert file_bytes(folder) == 0


def test_published_groups_of_a_killed_writer_are_checked_before_they_count(make_store: MakeStore, folder: Path) -> None:
    store = make_store()
    links = chain(2 * 4096)
    writer = store.open_writer(links, first=0, owner="job")
    write_layers(writer, links, range(4))
    writer.suspend()
    second_group = sorted((folder / "blocks").glob(f"{links[0].key}-*.kv"))[1]
    data = bytearray(second_group.read_bytes())
    data[5000] ^= 1
    second_group.write_bytes(data)
    again = store.open_writer(links, first=0, owner="job")
    assert again.groups_done() == 1
    assert store.counters.get("checksum_failures") == 1
    assert not second_group.exists()  # its bytes are not counted any more
    write_layers(again, links, range(2, 5))
    again.commit()
    reader = store.open_reader(links)
    assert_right(reader, links)
    reader.close()
