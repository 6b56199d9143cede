"""One segment's attention in one layer: what every policy gets, and how work is cut into bounded pieces."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.chain import SEGMENT_TOKENS, Segment

# Floating-point operations of one piece of attention: at most 0.25 s on two cores of the machine that was measured.
_PIECE_FLOPS = 1.5e11


@dataclass(frozen=True)
class SegmentTask:
    """Rows [start, start + rows) of one layer over all keys up to them."""

    layer: int
    start: int  # position of the first row; a multiple of 4,096
    q: torch.Tensor  # [rows, heads, head_dim]
    k: torch.Tensor  # [kv_heads, start + rows, head_dim], as stored
    v: torch.Tensor
    out: torch.Tensor  # [rows, heads, head_dim], written
    seed: int  # from the segment's chain key and the layer

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[0]

    def pieces(self, unit: int, *, share: float = 1.0) -> Iterator[tuple[int, int]]:
        """Row ranges of bounded cost, by position alone: whole segments halved down to `unit` rows.

        `share` of the rows' full attention is what will be computed. On a GPU all rows are one piece.
        """
        if self.q.device.type != "cpu":
            yield 0, self.rows
            return
        flops = share * 4 * self.q.shape[1] * self.q.shape[2] * self.k.shape[1]
        size = SEGMENT_TOKENS
        while size > unit and size * flops > _PIECE_FLOPS:
            size //= 2
        for first in range(0, self.rows, size):
            yield first, min(first + size, self.rows)


def segment_seed(segment: Segment, layer: int) -> int:
    """Of everything that is drawn by chance for a segment in a layer: from its chain key, which ends with it."""
    return int(segment.key[:14], 16) ^ layer
