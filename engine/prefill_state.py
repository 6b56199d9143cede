"""What a layer-major prefill holds: hidden states of all new rows, K and V of one layer, and its bookkeeping."""

import numpy as np
import torch
from numpy.typing import NDArray

from engine import forward
from engine.chain import Segment
from engine.model import Model
from engine.sparse.report import AttentionReport

# The last tile of a document is padded to a multiple of it.
ROW_GRANULE = 64
# Positions whose rotary cosines and sines are kept from layer to layer: 256 bytes each for heads of 64.
_KEPT_ROTATIONS = 65_536


class PrefillState:
    """Rows count from `first_row`, behind what the store already has; positions from the prefix's start."""

    def __init__(self, model: Model, chain: list[Segment], first_segment: int) -> None:
        spec = model.spec
        self._model = model
        self._rotations: dict[int, forward.Rotation] = {}
        self.chain = chain
        self.first_segment = first_segment
        self.first_row = chain[first_segment].start if first_segment < len(chain) else chain[-1].end
        self.end = chain[-1].end
        padded = -(-(self.end - self.first_row) // ROW_GRANULE) * ROW_GRANULE
        self.hidden = torch.zeros(padded, spec.hidden, dtype=model.dtype)
        capacity = self.end if first_segment < len(chain) else 0
        self.kv = torch.zeros(2, spec.kv_heads, capacity, spec.head_dim, dtype=model.dtype)
        self.report = AttentionReport()
        self.first_layer = 0
        self.published_layers = 0  # of an earlier attempt: computed again where needed, not written again
        self.layers_recomputed = 0
        self.total_s = 0.0  # predicted
        self.done_s = 0.0
        self.done_here_s = 0.0  # by this attempt
        self.last_logits: torch.Tensor | None = None

    def rotation(self, tile: range) -> forward.Rotation:
        """Of the tile's positions. A start always comes with the same length."""
        kept = self._rotations.get(tile.start)
        if kept is not None:
            return kept
        rotation = forward.rotation(self._model, tile.start, len(tile))
        if sum(len(other.cos) for other in self._rotations.values()) + len(tile) <= _KEPT_ROTATIONS:
            self._rotations[tile.start] = rotation
        return rotation

    @property
    def hidden_bytes(self) -> NDArray[np.uint8]:
        """The hidden states' memory, [bytes]."""
        return self.hidden.view(torch.uint8).numpy().reshape(-1)
