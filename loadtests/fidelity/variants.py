"""What is compared: the fidelities of the service and the fixed policies, each an engine on one store."""

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.chain import TokenIds
from engine.engine import LocalEngine, open_engine
from engine.interfaces import Fidelity, KVLayout, KVStore, PrefillRequest, PrefillResult
from engine.kv_store import DiskLimits, LocalKVStore
from engine.sparse.settings import Policy, SparseSettings
from loadtests.fidelity.inside import settings_of

DENSE = "exact"
SALT = b"fidelity"
_FIDELITIES: tuple[Fidelity, ...] = ("exact", "default", "strict", "fast")
_POLICIES: tuple[Policy, ...] = ("a_shape", "vertical_slash", "block_sparse")
NAMES = (*_FIDELITIES, *_POLICIES)


@dataclass(frozen=True)
class Variant:
    """A fidelity of the default policy, or a fixed policy with its default budgets."""

    name: str
    fidelity: Fidelity
    policy: Policy

    @classmethod
    def named(cls, name: str) -> "Variant":
        """Raises ValueError for an unknown name."""
        for fidelity in _FIDELITIES:
            if name == fidelity:
                return cls(name, fidelity, "adaptive")
        for policy in _POLICIES:
            if name == policy:
                return cls(name, "default", policy)
        raise ValueError(f"unknown fidelity or policy {name!r}, expected one of {', '.join(NAMES)}")


@dataclass
class Engines:
    """One engine a policy, opened when first used; all keep their KV under `kv_folder`."""

    model: Path
    kv_folder: Path
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    cap_bytes: int = 48 << 30
    _store: KVStore | None = None
    _open: dict[Policy, LocalEngine] = field(default_factory=dict)
    _owners: "itertools.count[int]" = field(default_factory=itertools.count)

    def of(self, variant: Variant) -> LocalEngine:
        """Raises ModelError, ValueError for a device that isn't there."""
        if variant.policy not in self._open:
            self._open[variant.policy] = open_engine(
                self.model,
                self._open_store,
                device=self.device,
                dtype=self.dtype,
                threads=self.threads,
                sparse=self._settings(variant.policy),
            )
        return self._open[variant.policy]

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
        if self._store is not None:
            self._store.release(holder)

    def _open_store(self, layout: KVLayout) -> KVStore:
        if self._store is None:
            limits = DiskLimits(cap_bytes=self.cap_bytes, floor_bytes=1 << 30)
            self._store = LocalKVStore(self.kv_folder, layout, limits)
        return self._store
