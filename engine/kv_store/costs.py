"""What it costs to load KV from a tier, and to compute it again: learnt from what both took."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_WEIGHT = 0.3  # of the latest measurement
_FORGET_S = 600.0  # a tier not measured for so long may have recovered: it is tried again


@dataclass(frozen=True)
class _Rate:
    per_s: float
    measured_at: float


class Costs:
    """Rates of loading (bytes) and computing (tokens). What is not known yet is worth trying."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rates: dict[str, _Rate] = {}

    def loaded(self, tier: str, size_bytes: int, seconds: float) -> None:
        self._learn(tier, size_bytes, seconds)

    def computed(self, num_tokens: int, seconds: float) -> None:
        self._learn("", num_tokens, seconds)

    def load_s(self, tier: str, size_bytes: int) -> float | None:
        """Predicted seconds, None where nothing is known (any more)."""
        rate = self._rates.get(tier)
        if rate is None or self._clock() - rate.measured_at > _FORGET_S:
            return None
        return size_bytes / rate.per_s

    def compute_s(self, num_tokens: int) -> float | None:
        rate = self._rates.get("")
        return None if rate is None else num_tokens / rate.per_s

    def worth_loading(self, tier: str, size_bytes: int, num_tokens: int) -> bool:
        """Whether `size_bytes` from `tier` are predicted to be there sooner than `num_tokens` are computed."""
        load_s, compute_s = self.load_s(tier, size_bytes), self.compute_s(num_tokens)
        return load_s is None or compute_s is None or load_s < compute_s

    def _learn(self, name: str, amount: int, seconds: float) -> None:
        if amount <= 0:
            return
        per_s, now = amount / max(seconds, 1e-6), self._clock()
        with self._lock:
            old = self._rates.get(name)
            if old is not None and now - old.measured_at <= _FORGET_S:
                per_s = old.per_s + _WEIGHT * (per_s - old.per_s)
            self._rates[name] = _Rate(per_s, now)
