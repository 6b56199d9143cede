"""The engine as the worker opens it: model, KV store and prompt format that belong together. Loads torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.interfaces import Engine, KVLayout
from engine.kv_store import (
    Counters,
    DiskLimits,
    Keyring,
    LocalKVStore,
    SharedSettings,
    TieredKVStore,
    with_shared_tiers,
)
from engine.model_folder import resolve_model
from engine.plan import plan
from engine.resume import ResumeFolder
from engine.sparse.settings import chosen_settings
from engine.spec import load_spec
from service.backend import KVReport
from service.housekeeping import KVChores, Unfinished
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
    prefill_bytes: Callable[[int], int] = lambda num_tokens: 0  # memory that a prefill of so many tokens holds
    resume: Unfinished | None = None  # the points from which interrupted prefills go on


class StoreReport:
    """What a store holds. Implements service.backend.KVReport."""

    def __init__(self, store: LocalKVStore | TieredKVStore) -> None:
        self._catalog = store.catalog

    def describe(self, holder: str) -> Mapping[str, int]:
        return self._catalog.describe(holder)

    def holders(self) -> Mapping[str, int]:
        entries = self._catalog.entries()
        return {entry.holder: entry.size_bytes for entry in entries if entry.holder is not None and entry.size_bytes}

    def usage(self) -> Mapping[str, int]:
        return self._catalog.usage()


def open_engine_parts(settings: Settings, metrics: Metrics) -> EngineParts:
    """Raises ModelError, ValueError (an unknown device or dtype, too few GPUs), OSError, EngineError."""
    from engine.device import buffer_memory, device_type
    from engine.engine import open_engine
    from kernels.dispatch import paths

    folder = resolve_model(settings.model, cache_dir=settings.cache_dir)
    model = ServedModel.load(settings.model, folder)
    stores: list[LocalKVStore | TieredKVStore] = []
    spec = load_spec(folder)

    def open_store(layout: KVLayout) -> TimedKVStore:
        limits = DiskLimits(settings.kv_disk_bytes, settings.disk_floor_bytes)
        counters = Counters()
        metrics.watch_kv(counters.snapshot)
        keyring = None if settings.kv_key_file is None else Keyring.load(settings.kv_key_file)
        store = LocalKVStore(
            settings.data_dir / "kv",
            layout,
            limits,
            host_bytes=settings.kv_host_bytes,
            counters=counters,
            keyring=keyring,
            allocate=buffer_memory(settings.device),
        )
        shared = SharedSettings(
            settings.kv_shared_dir,
            settings.kv_shared_bytes,
            settings.kv_redis_url,
            settings.kv_redis_bytes,
            settings.kv_redis_document_bytes,
        )
        pending = settings.data_dir / "kv" / "shared-pending"
        stores.append(with_shared_tiers(store, shared, pending) if shared.any else store)
        return TimedKVStore(stores[-1], metrics)

    shown: dict[str, str] = {}
    resume_dir = settings.data_dir / "resume"

    def report() -> None:
        for op, (path, _) in paths().items():
            if (before := shown.get(op, path)) != path:  # it failed while it was used
                metrics.kernel_path.labels(op, before).set(0)
            metrics.kernel_path.labels(op, path).set(1)
            shown[op] = path

    engine = open_engine(
        folder,
        open_store,
        resume_dir=resume_dir,
        resume_bytes=settings.resume_bytes,
        checkpoint_s=settings.checkpoint_s,
        device=settings.device,
        dtype=settings.dtype,
        linears=settings.linears,
        kv_dtype=settings.kv_dtype,
        kv_way=settings.kv_way,
        gpus=settings.gpus,
        threads=settings.threads,
        sparse=chosen_settings(settings.sparse_policy, settings.head_config, device_type=device_type(settings.device)),
    )
    (store,) = stores
    itemsize = max(2, store.layout.bytes_per_token // spec.kv_bytes_per_token(1))

    def prefill_bytes(num_tokens: int) -> int:
        needs = plan(spec, num_tokens, itemsize=itemsize)
        return needs.peak_memory_bytes - needs.weight_bytes

    def close() -> None:
        engine.close()
        store.close()

    return EngineParts(
        engine,
        store,
        model,
        folder / "tokenizer.json",
        report,
        close,
        StoreReport(store),
        engine.device,
        prefill_bytes,
        ResumeFolder(resume_dir, cap_bytes=settings.resume_bytes),
    )
