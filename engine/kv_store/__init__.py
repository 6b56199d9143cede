"""Stored KV: kept on disk and in host memory, keyed by content, checked, held under its caps. Torch-free.

`LocalKVStore` reads and writes (the worker); `KVCatalog` describes, releases, verifies and evicts (the API process).
"""

from engine.kv_store.catalog import KVCatalog
from engine.kv_store.counters import Counters
from engine.kv_store.layout import layout_for
from engine.kv_store.report import CacheEntry
from engine.kv_store.space import DiskLimits
from engine.kv_store.store import LocalKVStore
from engine.kv_store.verify import VerifyReport

__all__ = ["CacheEntry", "Counters", "DiskLimits", "KVCatalog", "LocalKVStore", "VerifyReport", "layout_for"]
