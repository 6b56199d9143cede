"""Stored KV: kept on disk, in host memory and in shared tiers, keyed by content, checked, held under caps. Torch-free.

`LocalKVStore` reads and writes (the worker), `TieredKVStore` with tiers behind it that other machines see too;
`KVCatalog` describes, releases, verifies and evicts (the API process).
"""

from engine.kv_store.catalog import KVCatalog
from engine.kv_store.counters import Counters
from engine.kv_store.layout import layout_for
from engine.kv_store.report import CacheEntry
from engine.kv_store.sealing import Keyring
from engine.kv_store.shared import SharedSettings, with_shared_tiers
from engine.kv_store.space import DiskLimits
from engine.kv_store.store import LocalKVStore
from engine.kv_store.tiered import TieredKVStore
from engine.kv_store.verify import VerifyReport

__all__ = [
    "CacheEntry",
    "Counters",
    "DiskLimits",
    "KVCatalog",
    "Keyring",
    "LocalKVStore",
    "SharedSettings",
    "TieredKVStore",
    "VerifyReport",
    "layout_for",
    "with_shared_tiers",
]
