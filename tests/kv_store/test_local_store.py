"""The local store under the contract, on real files."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.kv_store import DiskLimits, LocalKVStore
from tests.contracts.kv_store_contract import (
    CapContract,
    KVStoreContract,
    LeaseContract,
    OpenStore,
    UnfinishedWorkContract,
)
from tests.kv_store.kv_data import LAYOUT

MIB = 1024**2


@pytest.fixture(params=["disk", "host", "shared directory"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    stores: list[LocalKVStore] = []

    def open_one(*, cap_bytes: int = 64 * MIB, clock: Callable[[], float] = time.time) -> LocalKVStore:
        host_bytes = 64 * MIB if request.param == "host" else 0
        several = request.param == "shared directory"
        store = LocalKVStore(
            tmp_path, LAYOUT, DiskLimits(cap_bytes), host_bytes=host_bytes, clock=clock, several_machines=several
        )
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        store.close()


class TestLocalStore(KVStoreContract, CapContract, UnfinishedWorkContract, LeaseContract):
    pass
