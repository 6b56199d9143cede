"""What a prefill's attention kept: density, the guard's recall cells, the pattern of each KV-head group."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.interfaces import RecallReport


@dataclass
class AttentionReport:
    """Grows segment by segment; survives a resume as JSON."""

    kept_pairs: float = 0.0  # causal (row, key) pairs computed, over layers and KV-head groups
    all_pairs: float = 0.0
    recalls: list[float] = field(default_factory=list)  # one a (layer, segment, KV-head group) that stayed sparse
    below_target: bool = False
    # "layer:group" → pattern → kept blocks of the segments where the group looked like it; none before the crossover
    patterns: dict[str, dict[str, int]] = field(default_factory=dict)

    def add_dense(self, layer: int, groups: int, start: int, rows: int, *, blocks: int = 0) -> None:
        """`blocks`: what the vote counts, where a sparse choice turned out so large that the segment went dense."""
        pairs = float(groups * causal_pairs(start, rows))
        self.kept_pairs += pairs
        self.all_pairs += pairs
        for group in range(groups):
            self.vote(layer, group, "dense", blocks)

    def add_pairs(self, kept: float, total: float) -> None:
        self.kept_pairs += kept
        self.all_pairs += total

    def vote(self, layer: int, group: int, pattern: str, weight: int) -> None:
        votes = self.patterns.setdefault(f"{layer}:{group}", {})
        votes[pattern] = votes.get(pattern, 0) + weight

    @property
    def density(self) -> float:
        return self.kept_pairs / self.all_pairs if self.all_pairs else 1.0

    def recall(self, target: float) -> RecallReport | None:
        if not self.recalls:
            return None
        values = np.asarray(self.recalls)
        return RecallReport(
            target=target,
            mean=float(values.mean()),
            p5=float(np.quantile(values, 0.05)),
            worst=float(values.min()),
            below_target=self.below_target,
        )

    def heads(self) -> dict[str, int]:
        """Pattern → number of (layer, KV-head group) pairs; a group is what most of its kept blocks look like."""
        winners = Counter(max(votes, key=lambda pattern: (votes[pattern], pattern)) for votes in self.patterns.values())
        return dict(winners)

    def to_json(self) -> dict[str, Any]:
        return {
            "kept_pairs": self.kept_pairs,
            "all_pairs": self.all_pairs,
            "recalls": self.recalls,
            "below_target": self.below_target,
            "patterns": self.patterns,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "AttentionReport":
        return cls(**value)


def causal_pairs(start: int, rows: int) -> int:
    """(row, key) pairs of rows [start, start + rows) with their past and themselves."""
    return rows * start + rows * (rows + 1) // 2
