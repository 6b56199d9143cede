"""What a prefill's attention kept: density, the guard's recall cells, the pattern of each KV-head group."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from engine.interfaces import RecallReport, SegmentRecall

# A pattern's letter in a head map.
HEAD_LETTERS = {"dense": "d", "a_shape": "a", "vertical_slash": "v", "block_sparse": "b"}


@dataclass
class SegmentReport:
    """One segment, over layers and KV-head groups."""

    rows: int
    kept_pairs: float = 0.0  # causal (row, key) pairs computed
    all_pairs: float = 0.0
    recalls: list[float] = field(default_factory=list)  # one a (layer, KV-head group) that stayed sparse


@dataclass
class AttentionReport:
    """Grows segment by segment; survives a resume as JSON."""

    segments: dict[str, SegmentReport] = field(default_factory=dict)  # by first row, in JSON's spelling
    below_target: bool = False
    # "layer:group" → pattern → kept blocks of the segments where the group looked like it; none before the crossover
    patterns: dict[str, dict[str, int]] = field(default_factory=dict)

    def add_dense(self, layer: int, groups: int, start: int, rows: int, *, blocks: int = 0) -> None:
        """`blocks`: what the vote counts, where a sparse choice turned out so large that the segment went dense."""
        pairs = float(groups * causal_pairs(start, rows))
        self.add_pairs(start, rows, pairs, pairs)
        for group in range(groups):
            self.vote(layer, group, "dense", blocks)

    def add_pairs(self, start: int, rows: int, kept: float, total: float) -> None:
        segment = self._segment(start, rows)
        segment.kept_pairs += kept
        segment.all_pairs += total

    def add_recalls(self, start: int, rows: int, recalls: list[float]) -> None:
        """Of one layer's KV-head groups; rounded, since the notes of a resume point hold all of them."""
        self._segment(start, rows).recalls += [round(recall, 6) for recall in recalls]

    def _segment(self, start: int, rows: int) -> SegmentReport:
        return self.segments.setdefault(str(start), SegmentReport(rows))

    def vote(self, layer: int, group: int, pattern: str, weight: int) -> None:
        votes = self.patterns.setdefault(f"{layer}:{group}", {})
        votes[pattern] = votes.get(pattern, 0) + weight

    @property
    def density(self) -> float:
        return _density(*self.segments.values())

    @property
    def recalls(self) -> list[float]:
        """One a (segment, layer, KV-head group) that stayed sparse."""
        return [recall for segment in self.segments.values() for recall in segment.recalls]

    def recall(self, target: float) -> RecallReport | None:
        values = np.asarray(self.recalls)
        if not len(values):
            return None
        return RecallReport(
            target=target,
            mean=float(values.mean()),
            p5=float(np.quantile(values, 0.05)),
            worst=float(values.min()),
            below_target=self.below_target,
        )

    def segment_recalls(self) -> list[SegmentRecall]:
        """In document order."""
        return [
            SegmentRecall(
                start=int(start),
                end=int(start) + segment.rows,
                density=_density(segment),
                mean=float(np.mean(segment.recalls)) if segment.recalls else None,
                worst=min(segment.recalls, default=None),
            )
            for start, segment in sorted(self.segments.items(), key=lambda item: int(item[0]))
        ]

    def head_patterns(self) -> dict[str, str]:
        """ "layer:group" → pattern of each KV-head group: what most of its kept blocks look like."""
        return {
            group: max(votes, key=lambda pattern: (votes[pattern], pattern)) for group, votes in self.patterns.items()
        }

    def heads(self) -> dict[str, int]:
        """Pattern → number of (layer, KV-head group) pairs."""
        return dict(Counter(self.head_patterns().values()))

    def head_map(self) -> list[str]:
        """`head_patterns` as one string a layer with one of HEAD_LETTERS a KV-head group; `-` where none is known."""
        found = {tuple(map(int, name.split(":"))): pattern for name, pattern in self.head_patterns().items()}
        layers = max((layer for layer, _ in found), default=-1) + 1
        groups = max((group for _, group in found), default=-1) + 1
        return [
            "".join(HEAD_LETTERS[found[layer, group]] if (layer, group) in found else "-" for group in range(groups))
            for layer in range(layers)
        ]

    def add(self, other: "AttentionReport") -> None:
        """Take in what another report saw of other layers, or of another document."""
        for start, segment in other.segments.items():
            own = self._segment(int(start), segment.rows)
            own.rows = max(own.rows, segment.rows)
            own.kept_pairs += segment.kept_pairs
            own.all_pairs += segment.all_pairs
            own.recalls += segment.recalls
        self.below_target |= other.below_target
        for group, votes in other.patterns.items():
            layer, head = map(int, group.split(":"))
            for pattern, weight in votes.items():
                self.vote(layer, head, pattern, weight)

    def to_json(self) -> dict[str, Any]:
        return {
            "segments": {start: asdict(segment) for start, segment in self.segments.items()},
            "below_target": self.below_target,
            "patterns": self.patterns,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "AttentionReport":
        segments = {start: SegmentReport(**segment) for start, segment in value["segments"].items()}
        return cls(segments, value["below_target"], value["patterns"])


def _density(*segments: SegmentReport) -> float:
    total = sum(segment.all_pairs for segment in segments)
    return sum(segment.kept_pairs for segment in segments) / total if total else 1.0


def causal_pairs(start: int, rows: int) -> int:
    """(row, key) pairs of rows [start, start + rows) with their past and themselves."""
    return rows * start + rows * (rows + 1) // 2
