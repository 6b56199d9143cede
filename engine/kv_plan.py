"""How much of a stored prefix to compute again while the rest is loaded, by predicted times. Torch-free.

Its first tokens cost least to compute, since they attend to little, and no more bytes to load than the others. So the
prefix is cut once: segments before the cut are computed, those behind it loaded at the same time, layer by layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from engine.chain import Segment
from engine.interfaces import KVLayout
from engine.kv_store.costs import Costs
from engine.sparse.settings import SparseSettings
from engine.work import PrefillWork

KVWay = Literal["auto", "load", "compute", "both"]
# A second of computing costs others so many seconds of waiting: the device could have been theirs.
_COMPUTE_WEIGHT = 0.2
# What computing must save, of the loading it replaces, to be worth it: predictions are not exact.
_LEAST_GAIN = 0.1
_LATEST_WEIGHT = 0.5  # of the latest measurement of the machine's slowness
_SMALLEST_SAMPLE = 1 << 20  # bytes: a smaller read tells of latency, not of the rate


@dataclass(frozen=True)
class KVPlan:
    """Compute the first `segments`, load the rest. Seconds as predicted; `load_s` None where no rate is known."""

    segments: int
    load_s: float | None
    compute_s: float


class KVPlanner:
    """Learns what tiers give and how long computing takes against what engine.work predicts; then plans."""

    def __init__(self, work: PrefillWork, layout: KVLayout, way: KVWay = "auto", *, costs: Costs | None = None) -> None:
        """`way`: auto decides, the others are forced (both: somewhere in between). Raises ValueError."""
        if way not in get_args(KVWay):
            raise ValueError(f"kv_way: got {way!r}, expected {', '.join(get_args(KVWay))}")
        self.way = way
        self._work, self._layout, self._costs = work, layout, costs or Costs()
        self._slowness = 1.0  # measured seconds of computing / predicted ones

    def loaded(self, tier: str, size_bytes: int, seconds: float) -> None:
        """A read with nothing else in flight took so long."""
        if size_bytes >= _SMALLEST_SAMPLE:
            self._costs.loaded(tier, size_bytes, seconds)

    def computed(self, chain: Sequence[Segment], settings: SparseSettings, seconds: float) -> None:
        """All layers of these segments, the prefix's first, took so long."""
        predicted = self._work_s(chain, settings)
        if predicted > 0 and seconds > 0:
            self._slowness += _LATEST_WEIGHT * (seconds / predicted - self._slowness)

    def plan(self, chain: Sequence[Segment], settings: SparseSettings, tier: str) -> KVPlan:
        """For a prefix of which everything is stored, its slowest part in `tier`. Host memory is always read."""
        size_bytes = [self._layout.num_layers * self._layout.layer_bytes(each.num_tokens) for each in chain]
        whole_s = self._costs.load_s(tier, sum(size_bytes))
        load_only = KVPlan(0, whole_s, 0.0)
        if tier == "host" or self.way == "load":
            return load_only
        if self.way == "compute":
            return KVPlan(len(chain), 0.0, self._slowness * self._work_s(chain, settings))
        if whole_s is None:
            return KVPlan(len(chain) // 2, None, 0.0) if self.way == "both" else load_only
        plans, left, work_s = [load_only], sum(size_bytes), 0.0
        for count, (segment, size) in enumerate(zip(chain, size_bytes, strict=True), start=1):
            left -= size
            work_s += self._work_s([segment], settings)
            plans.append(KVPlan(count, whole_s * left / sum(size_bytes), self._slowness * work_s))
        if self.way == "both":
            return min(plans[1:-1], key=_latency_s, default=load_only)
        best = min(plans, key=_cost_s)
        return best if _cost_s(best) <= (1 - _LEAST_GAIN) * whole_s else load_only

    def _work_s(self, chain: Sequence[Segment], settings: SparseSettings) -> float:
        """As engine.work predicts it, all layers."""
        layer_s = sum(self._work.segment_s(segment.start, segment.num_tokens, settings) for segment in chain)
        return layer_s * self._layout.num_layers


def _latency_s(plan: KVPlan) -> float:
    return max(plan.load_s or 0.0, plan.compute_s)


def _cost_s(plan: KVPlan) -> float:
    return _latency_s(plan) + _COMPUTE_WEIGHT * plan.compute_s
