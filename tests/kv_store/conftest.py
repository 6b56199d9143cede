"""Stores over the test's own folder, closed behind it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from engine.kv_store import DiskLimits, KVCatalog, LocalKVStore
from tests.kv_store.kv_data import LAYOUT

CAP_BYTES = 64 * 1024**2


class MakeStore(Protocol):
    def __call__(self, *, cap_bytes: int = ..., floor_bytes: int = ..., **options: Any) -> LocalKVStore: ...


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def make_store(folder: Path) -> Iterator[MakeStore]:
    stores: list[LocalKVStore] = []

    def make(*, cap_bytes: int = CAP_BYTES, floor_bytes: int = 0, **options: Any) -> LocalKVStore:
        stores.append(LocalKVStore(folder, LAYOUT, DiskLimits(cap_bytes, floor_bytes), **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(make_store: MakeStore) -> LocalKVStore:
    return make_store()


@pytest.fixture
def catalog(folder: Path) -> Iterator[KVCatalog]:
    """The folder as the API process sees it."""
    catalog = KVCatalog(folder, DiskLimits(CAP_BYTES))
    yield catalog
    catalog.close()
