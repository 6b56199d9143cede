"""Opening the tiers that several machines share, as settings name them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.kv_store.counters import Counters
from engine.kv_store.redis_tier import RedisKVStore
from engine.kv_store.space import DiskLimits
from engine.kv_store.store import LocalKVStore
from engine.kv_store.tiered import SharedTier, TieredKVStore

# What a shared store counts and its machine shows as its own: damage is damage wherever it lies.
_SHOWN = ("checksum_failures", "key_misses", "read_errors", "write_errors", "index_errors")


@dataclass(frozen=True)
class SharedSettings:
    """None: no such tier. Sizes in bytes."""

    folder: Path | None = None
    folder_bytes: int = 0
    redis_url: str | None = None
    redis_bytes: int = 0
    redis_document_bytes: int = 0

    @property
    def any(self) -> bool:
        return self.folder is not None or self.redis_url is not None


def with_shared_tiers(
    local: LocalKVStore,
    settings: SharedSettings,
    pending_folder: Path,
    *,
    monotonic: Callable[[], float] = time.monotonic,
) -> TieredKVStore:
    """`local` with what `settings` name behind it: Redis first, the nearer one for what is small.

    Raises OSError or KVError where the folder can't be used, ValueError for a URL of another kind.
    """
    tiers, keyring = [], local.catalog.blocks.keyring
    if settings.redis_url is not None:
        redis = RedisKVStore(
            settings.redis_url,
            local.layout,
            cap_bytes=settings.redis_bytes,
            max_document_bytes=settings.redis_document_bytes,
            counters=_counters(local),
            keyring=keyring,
        )
        tiers.append(SharedTier("redis", redis))
    if settings.folder is not None:
        limits = DiskLimits(settings.folder_bytes)
        folder = LocalKVStore(
            settings.folder, local.layout, limits, counters=_counters(local), several_machines=True, keyring=keyring
        )
        tiers.append(SharedTier("directory", folder))
    return TieredKVStore(local, tiers, pending_folder, monotonic=monotonic)


def _counters(local: LocalKVStore) -> Counters:
    def show(name: str, labels: tuple[str, ...], amount: int) -> None:
        if name in _SHOWN:
            local.counters.add(name, *labels, amount=amount)

    return Counters(show)
