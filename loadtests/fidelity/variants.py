"""What is compared: the fidelities of the service, the fixed policies, forms of the KV and times of asking."""

import itertools
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from engine.chain import TokenIds
from engine.engine import LocalEngine, open_engine
from engine.interfaces import Fidelity, KVLayout, KVStore, PrefillRequest, PrefillResult
from engine.kv_format import KVDtype
from engine.kv_store import DiskLimits, LocalKVStore
from engine.sparse.settings import Policy, SparseSettings
from loadtests.fidelity.inside import settings_of

DENSE, FP8_KV, LATE = "exact", "fp8_kv", "late"
SALT = b"fidelity"
_FIDELITIES: tuple[Fidelity, ...] = ("exact", "default", "strict", "fast")
_POLICIES: tuple[Policy, ...] = ("a_shape", "vertical_slash", "block_sparse")
# Compared task by task with dense attention; and everything that can be measured.
NAMES = (*_FIDELITIES, *_POLICIES, FP8_KV)
MEASURED = (*NAMES, LATE)


@dataclass(frozen=True)
class Variant:
    """A fidelity of the default policy, or a fixed policy with its default budgets.

    `fp8_kv` is fidelity `default` with its KV kept in FP8, `late` the same with few questions asked at several times.
    """

    name: str
    fidelity: Fidelity
    policy: Policy
    kv_dtype: KVDtype = "auto"

    @classmethod
    def named(cls, name: str) -> "Variant":
        """Raises ValueError for an unknown name."""
        for fidelity in _FIDELITIES:
            if name == fidelity:
                return cls(name, fidelity, "adaptive")
        for policy in _POLICIES:
            if name == policy:
                return cls(name, "default", policy)
        if name in (FP8_KV, LATE):
            return cls(name, "default", "adaptive", "float8" if name == FP8_KV else "auto")
        raise ValueError(f"unknown fidelity or policy {name!r}, expected one of {', '.join(MEASURED)}")


@dataclass
class Engines:
    """One engine a policy and form of the KV, opened when first used; a form's KV is a store under `kv_folder`."""

    model: Path
    kv_folder: Path
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    cap_bytes: int = 48 << 30
    _stores: dict[KVDtype, KVStore] = field(default_factory=dict)
    _open: dict[tuple[Policy, KVDtype], LocalEngine] = field(default_factory=dict)
    _owners: "itertools.count[int]" = field(default_factory=itertools.count)

    def of(self, variant: Variant) -> LocalEngine:
        """Raises ModelError, ValueError for a device that isn't there."""
        kind = variant.policy, variant.kv_dtype
        if kind not in self._open:
            self._open[kind] = open_engine(
                self.model,
                partial(self._open_store, variant.kv_dtype),
                device=self.device,
                dtype=self.dtype,
                threads=self.threads,
                sparse=self._settings(variant.policy),
                kv_dtype=variant.kv_dtype,
            )
        return self._open[kind]

    def _settings(self, policy: Policy) -> SparseSettings | None:
        """The fixed policies choose among blocks of the device's own size."""
        if policy == "adaptive":
            return None
        return replace(settings_of(self.of(Variant.named("default"))), policy=policy)

    def prefill(self, variant: Variant, tokens: TokenIds, *, holder: str) -> PrefillResult:
        """Make sure that the KV of `tokens` is stored. Raises what the engine's prefill does."""
        request = PrefillRequest(
            tokens=tokens, salt=SALT, owner=f"fidelity-{next(self._owners)}", holder=holder, fidelity=variant.fidelity
        )
        prefill = self.of(variant).start_prefill(request)
        while prefill.step():
            pass
        return prefill.result

    def release(self, holder: str) -> None:
        """Remove the KV that only `holder` holds."""
        for store in self._stores.values():
            store.release(holder)

    def _open_store(self, kv_dtype: KVDtype, layout: KVLayout) -> KVStore:
        if kv_dtype not in self._stores:
            limits = DiskLimits(cap_bytes=self.cap_bytes, floor_bytes=1 << 30)
            self._stores[kv_dtype] = LocalKVStore(self.kv_folder / kv_dtype, layout, limits)
        return self._stores[kv_dtype]
