"""The engine as the worker opens it: model, KV store and prompt format that belong together. Loads torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.interfaces import Engine, KVLayout
from engine.kv_store import Counters, DiskLimits, LocalKVStore
from engine.model_folder import resolve_model
from service.backend import KVReport
from service.housekeeping import KVChores
from service.metrics import Metrics
from service.metrics_kv import TimedKVStore
from service.served_model import ServedModel
from service.settings import Settings
from service.stages.context import KVHolders


class KVAdministration(KVHolders, KVChores, Protocol):
    """What stages and chores need of the KV store (engine.kv_store.LocalKVStore)."""


@dataclass(frozen=True)
class EngineParts:
    engine: Engine
    kv: KVAdministration
    model: ServedModel
    tokenizer_file: Path
    report: Callable[[], None]  # puts what only the engine knows into the metrics
    close: Callable[[], None]
    kv_report: KVReport
    device: str = "cpu"


class StoreReport:
    """What a store holds. Implements service.backend.KVReport."""

    def __init__(self, store: LocalKVStore) -> None:
        self._catalog = store.catalog

    def describe(self, holder: str) -> Mapping[str, int]:
        return self._catalog.describe(holder)

    def holders(self) -> Mapping[str, int]:
        entries = self._catalog.entries()
        return {entry.holder: entry.size_bytes for entry in entries if entry.holder is not None and entry.size_bytes}


def open_engine_parts(settings: Settings, metrics: Metrics) -> EngineParts:
    """Raises ModelError, ValueError (an unknown device or dtype), OSError, KVError."""
    from engine.engine import open_engine
    from kernels.dispatch import paths

    folder = resolve_model(settings.model, cache_dir=settings.cache_dir)
    model = ServedModel.load(settings.model, folder)
    stores: list[LocalKVStore] = []

    def open_store(layout: KVLayout) -> TimedKVStore:
        limits = DiskLimits(settings.kv_disk_bytes, settings.disk_floor_bytes)
        counters = Counters()
        metrics.watch_kv(counters.snapshot)
        store = LocalKVStore(
            settings.data_dir / "kv", layout, limits, host_bytes=settings.kv_host_bytes, counters=counters
        )
        stores.append(store)
        return TimedKVStore(store, metrics)

    shown: dict[str, str] = {}

    def report() -> None:
        for op, (path, _) in paths().items():
            if (before := shown.get(op, path)) != path:  # it failed while it was used
                metrics.kernel_path.labels(op, before).set(0)
            metrics.kernel_path.labels(op, path).set(1)
            shown[op] = path

    engine = open_engine(
        folder,
        open_store,
        resume_dir=settings.data_dir / "resume",
        resume_bytes=settings.resume_bytes,
        checkpoint_s=settings.checkpoint_s,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
    )
    (store,) = stores
    tokenizer_file = folder / "tokenizer.json"
    return EngineParts(engine, store, model, tokenizer_file, report, store.close, StoreReport(store), engine.device)
