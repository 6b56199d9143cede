"""Layers come from the page cache where they lie there, else past it; either way the same bytes, checked."""

import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from engine.chain import segment_chain
from engine.errors import KVCorrupt
from engine.interfaces import KVLayout
from engine.kv_store import DiskLimits, LocalKVStore
from engine.kv_store.buffers import BufferPool
from engine.kv_store.group_file import GroupFileReader
from engine.kv_store.layout import ALIGNMENT, aligned
from loadtests.raw_disk import drop_from_page_cache

# 1,000 tokens of a layer are 4,250,000 bytes: not whole pages.
LAYOUT = KVLayout(num_layers=3, bytes_per_token=4250, layers_per_group=2)
CHAIN = segment_chain(np.arange(1000, dtype=np.uint32), salt=b"salt", digest="digest")


@pytest.fixture
def layers() -> list[bytes]:
    return [np.random.default_rng(layer).bytes(LAYOUT.layer_bytes(1000)) for layer in range(3)]


@pytest.fixture
def file(tmp_path: Path, layers: list[bytes]) -> GroupFileReader:
    """The first group's file, in the page cache as it was written."""
    store = LocalKVStore(tmp_path, LAYOUT, DiskLimits(1 << 30))
    writer = store.open_writer(CHAIN, first=0, owner="test")
    for layer, data in enumerate(layers):
        writer.write_layer(layer, 0, memoryview(data))
    writer.commit()
    store.close()
    path, _ = sorted((tmp_path / "blocks").iterdir())
    key, copy, _ = path.stem.split("-")
    from engine.kv_store.copies import Copy

    return GroupFileReader(path, Copy(copy, key, 0, 1000, LAYOUT, path.stat().st_size).block(0))


def _uncached(file: GroupFileReader) -> None:
    drop_from_page_cache([Path(os.readlink(f"/proc/self/fd/{file._fd}"))])


def _is_direct(file: GroupFileReader) -> bool:
    return bool(fcntl.fcntl(file._fd, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("shift", [0, 8], ids=["aligned", "unaligned"])
def test_padded_buffers_get_the_layer(file: GroupFileReader, layers: list[bytes], cached: bool, shift: int) -> None:
    size = aligned(len(layers[1]))
    memory = BufferPool(0).take_aligned(size + ALIGNMENT, ALIGNMENT)
    memory[:] = b"\xff" * len(memory)
    buffer = memory[shift : shift + size]
    if not cached:
        _uncached(file)
    file.read_into(1, buffer)
    assert bytes(buffer[: len(layers[1])]) == layers[1]
    assert not _is_direct(file), "the next header or layer may be asked for with any buffer"
    assert memory[:shift].tolist() == [255] * shift
    file.close()


def test_direct_reading_stays_out_of_the_page_cache(file: GroupFileReader, layers: list[bytes]) -> None:
    buffer = BufferPool(0).take_aligned(aligned(len(layers[0])), ALIGNMENT)
    _uncached(file)
    if not file._set_direct(True):
        pytest.skip("this file system has no O_DIRECT")
    file._set_direct(False)
    assert not file._is_cached(0)
    file.read_into(0, buffer)
    assert bytes(buffer[: len(layers[0])]) == layers[0]
    assert not file._is_cached(0)
    unaligned = memoryview(bytearray(len(layers[0])))
    file.read_into(0, unaligned)
    assert unaligned == layers[0]
    assert file._is_cached(0), "an unpadded buffer is filled through the page cache"
    file.close()


def test_damage_is_seen_past_the_page_cache_too(file: GroupFileReader, layers: list[bytes]) -> None:
    path = Path(os.readlink(f"/proc/self/fd/{file._fd}"))
    data = bytearray(path.read_bytes())
    data[file._block.offset(1) + 777] ^= 1
    path.write_bytes(data)
    os.sync()
    _uncached(file)
    buffer = BufferPool(0).take_aligned(aligned(len(layers[1])), ALIGNMENT)
    with pytest.raises(KVCorrupt, match="checksum"):
        file.read_into(1, buffer)
    file.close()


def test_a_cut_file_is_corrupt(file: GroupFileReader, layers: list[bytes]) -> None:
    path = Path(os.readlink(f"/proc/self/fd/{file._fd}"))
    os.truncate(path, file._block.offset(1) + 5000)
    buffer = BufferPool(0).take_aligned(aligned(len(layers[1])), ALIGNMENT)
    with pytest.raises(KVCorrupt, match="ends inside"):
        file.read_into(1, buffer)
    file.close()


def test_an_aligned_buffer_is_nobody_elses_while_a_view_of_it_lives() -> None:
    pool = BufferPool(1 << 20)
    view = pool.take_aligned(4096, ALIGNMENT).toreadonly()[100:200]
    other = pool.take_aligned(4096, ALIGNMENT)
    other[:] = b"\xff" * 4096
    addresses = [np.frombuffer(one, np.uint8).ctypes.data for one in (view, other)]
    assert abs(addresses[0] - addresses[1]) >= 4096 - 100


def test_two_layers_of_idle_buffers_are_kept_while_they_are_expected() -> None:
    made: list[int] = []

    def allocate(size_bytes: int) -> np.ndarray:
        made.append(size_bytes)
        return np.empty(size_bytes, np.uint8)

    pool = BufferPool(100, allocate)
    pool.expect(1000)
    for _ in range(3):
        buffers = [pool.take(400) for _ in range(2)]
        del buffers
    assert made == [400, 400]
    pool.expect(-1000)
    assert pool._idle_bytes == 0
    pool.take(400)
    assert len(made) == 3
