"""The disk says no in the middle of writing: a clean error, nothing left behind, room given back."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import StorageFull
from engine.interfaces import KVWriter
from engine.kv_store.blocks import BlockFolder
from engine.kv_store.copies import Copy
from engine.kv_store.layout import group_file_bytes
from tests.contracts.kv_store_contract import full_bytes
from tests.kv_store.conftest import CAP_BYTES, MakeStore
from tests.kv_store.kv_data import LAYOUT, assert_right, chain, store_chain, write_layers

LINKS = chain(3 * 4096)
FIRST_GROUP_BYTES = 3 * group_file_bytes(LAYOUT, 4096, 0)


class FailingFolder(BlockFolder):
    """A block folder on a disk that fails with `code` behind `left` writes, until it is mended."""

    code = errno.ENOSPC
    left: int | None = None

    def write(self, copy: Copy, group: int, offset: int, data: bytes) -> None:
        if self.left == 0:
            super().write(copy, group, offset, data[: len(data) // 2])  # a torn write
            raise OSError(self.code, os.strerror(self.code), str(self.path(copy, group)))
        if self.left is not None:
            self.left -= 1
        super().write(copy, group, offset, data)


class GatedFolder(BlockFolder):
    """A disk that does nothing until its gate is opened."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Event()

    def write(self, copy: Copy, group: int, offset: int, data: bytes) -> None:
        self.gate.wait(30)
        super().write(copy, group, offset, data)


class SmallDisk(BlockFolder):
    def free_bytes(self) -> int:
        return 1000 + full_bytes(LINKS)


def write_all(writer: KVWriter) -> None:
    write_layers(writer, LINKS, range(5))
    writer.flush()


def temporary_files(folder: Path) -> list[Path]:
    return list((folder / "blocks").glob("*.tmp"))


@pytest.mark.parametrize("after", [0, 1, 7, 14])
@pytest.mark.parametrize(("code", "expected"), [(errno.ENOSPC, StorageFull), (errno.EIO, OSError)])
def test_a_failing_disk(code: int, expected: type[Exception], after: int, make_store: MakeStore, folder: Path) -> None:
    disk = FailingFolder(folder / "blocks")
    disk.code, disk.left = code, after
    store = make_store(open_blocks=lambda _: disk)
    writer = store.open_writer(LINKS, first=0, owner="job")
    with pytest.raises(expected):
        write_all(writer)
    with pytest.raises(expected):
        writer.flush()
    with pytest.raises(expected):
        writer.write_layer(4, 2, memoryview(bytes(LAYOUT.layer_bytes(4096))))
    assert temporary_files(folder) == []
    published = sum(path.stat().st_size for path in (folder / "blocks").iterdir())
    assert store.stored_bytes == published < full_bytes(LINKS)
    assert store.match(LINKS) == 0
    writer.abort()
    assert store.stored_bytes == 0
    assert list((folder / "blocks").iterdir()) == []
    disk.left = None
    store_chain(store, LINKS)
    reader = store.open_reader(LINKS)
    assert_right(reader, LINKS)
    reader.close()


def test_what_was_published_before_the_failure_is_taken_up(make_store: MakeStore, folder: Path) -> None:
    disk = FailingFolder(folder / "blocks")
    store = make_store(open_blocks=lambda _: disk)
    writer = store.open_writer(LINKS, first=0, owner="job")
    write_layers(writer, LINKS, range(2))
    writer.flush()
    disk.left = 1
    with pytest.raises(StorageFull) as raised:
        write_all(writer)
    assert 0 < raised.value.needed_bytes <= full_bytes(LINKS) - FIRST_GROUP_BYTES
    writer.suspend()
    disk.left = None
    again = store.open_writer(LINKS, first=0, owner="job")
    assert again.groups_done() == 1
    assert store.counters.get("resumed_bytes") == FIRST_GROUP_BYTES
    write_layers(again, LINKS, range(2, 5))
    again.commit()
    reader = store.open_reader(LINKS)
    assert_right(reader, LINKS)
    reader.close()


LIMITED = """
import resource, signal, sys
from pathlib import Path
from engine.kv_store import DiskLimits, LocalKVStore
from tests.kv_store.kv_data import LAYOUT, chain, write_layers

store = LocalKVStore(Path(sys.argv[1]), LAYOUT, DiskLimits(2**30))
links = chain(3 * 4096)
writer = store.open_writer(links, first=0, owner="job")
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (14_000, hard))  # inside the second layer of a file: a real partial write
try:
    write_layers(writer, links, range(5))
    writer.flush()
except OSError as error:
    print(type(error).__name__, error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
writer.abort()
print(store.stored_bytes)
store.close()
"""


def test_a_file_size_limit_of_the_kernel(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"OSError {errno.EFBIG}\n0\n"
    assert list((folder / "blocks").iterdir()) == []


def test_the_floor_of_the_file_system_is_held(make_store: MakeStore) -> None:
    store = make_store(floor_bytes=1001, open_blocks=SmallDisk)
    with pytest.raises(StorageFull) as raised:
        store.open_writer(LINKS, first=0, owner="job")
    assert raised.value.available_bytes == full_bytes(LINKS) - 1
    writer = store.open_writer(LINKS[:2], first=0, owner="job")
    with pytest.raises(StorageFull):  # what the first still has to write is spoken for
        store.open_writer(chain(2 * 4096, seed=1), first=0, owner="other")
    writer.abort()


def test_the_real_file_system_has_a_size(make_store: MakeStore) -> None:
    with pytest.raises(StorageFull):
        make_store(cap_bytes=2**62, floor_bytes=2**62).open_writer(LINKS, first=0, owner="job")


def test_a_slow_disk_holds_the_caller_back(make_store: MakeStore, folder: Path) -> None:
    disk = GatedFolder(folder / "blocks")
    layer_bytes = LAYOUT.layer_bytes(4096)
    store = make_store(write_buffer_bytes=4 * layer_bytes, open_blocks=lambda _: disk)
    writer = store.open_writer(LINKS, first=0, owner="job")
    handed_over: list[int] = []

    def hand_over() -> None:
        for layer in range(5):
            write_layers(writer, LINKS, [layer])
            handed_over.append(layer)

    thread = threading.Thread(target=hand_over)
    thread.start()
    thread.join(0.2)
    assert handed_over == [0]  # three pieces are waiting, a fourth fits, the fifth does not
    disk.gate.set()
    thread.join(30)
    assert handed_over == [0, 1, 2, 3, 4]
    writer.commit()
    assert store.match(LINKS) == 3


@pytest.mark.parametrize("end", ["abort", "suspend"])
def test_a_writer_can_be_ended_from_another_thread_while_it_is_held_back(
    end: str, make_store: MakeStore, folder: Path
) -> None:
    disk = GatedFolder(folder / "blocks")
    store = make_store(write_buffer_bytes=1, open_blocks=lambda _: disk)
    writer = store.open_writer(LINKS, first=0, owner="job")
    raised: list[Exception] = []

    def hand_over() -> None:
        try:
            write_layers(writer, LINKS, range(5))
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=hand_over)
    thread.start()
    thread.join(0.1)
    ending: Callable[[], None] = getattr(writer, end)
    ender = threading.Thread(target=ending)
    ender.start()
    ender.join(0.1)
    disk.gate.set()
    ender.join(10)
    thread.join(10)
    assert not thread.is_alive()
    assert not ender.is_alive()
    assert "closed" in str(raised[0])
    assert temporary_files(folder) == []
    assert store.stored_bytes < CAP_BYTES


def test_what_is_made_durable_before_what(make_store: MakeStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(fd: int) -> None:
        fsync(fd)
        name = Path(os.readlink(f"/proc/self/fd/{fd}"))
        events.append(f"fsync {name.suffix or name.name}")

    def record_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {path.suffix} {target.suffix}")
        return rename(path, target)

    store = make_store()
    writer = store.open_writer(LINKS[:1], first=0, owner="job")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", record_fsync)
        patch.setattr(Path, "rename", record_rename)
        for group, layers in enumerate((range(2), range(2, 4), range(4, 5))):
            assert writer.groups_done() == group
            write_layers(writer, LINKS[:1], layers)
            writer.flush()
            assert events == ["fsync .tmp", "rename .tmp .kv", "fsync blocks"] * (group + 1)
            assert store.match(LINKS[:1]) == 0
    writer.commit()
    assert store.match(LINKS[:1]) == 1
