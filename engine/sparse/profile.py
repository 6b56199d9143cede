"""Each head's best fixed pattern: by the softmax mass it keeps of a model's real queries and keys, at equal budget.

What is measured is what a prefill with the resulting head config does: blocks chosen from the sampled rows of each
segment, and the mass kept counted on rows that took no part in the choice.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine import forward
from engine.chain import SEGMENT_TOKENS, TokenIds
from engine.errors import ContextTooLong, InvalidRequest
from engine.model import Model
from engine.sparse import fixed, sampling
from engine.sparse.dense import attend_dense
from engine.sparse.head_config import HeadPattern
from engine.sparse.settings import SparseSettings
from engine.sparse.task import SegmentTask
from kernels.block_lse import block_masses
from kernels.block_scores import block_scores

SMALLEST_BUDGET = 512
_SINK_TOKENS = 128
# Shares of the budget that go to columns in the vertical-slash candidates; the diagonals have the rest.
_COLUMN_SHARES = (0.125, 0.25, 0.5, 0.75)
_TILE_ROWS = 1024
_EQUAL = 1e-3  # recalls closer than that are equal


@dataclass(frozen=True)
class ProfiledHead:
    """The best pattern of one query head and its recall: the mean softmax mass kept, 0–1."""

    pattern: HeadPattern
    recall: float


def candidates(budget: int, key_block: int) -> list[HeadPattern]:
    """Patterns that each keep about `budget` keys of a row."""
    columns = [round(budget * share / key_block) * key_block for share in _COLUMN_SHARES]
    return [
        HeadPattern("a_shape", _SINK_TOKENS, budget - _SINK_TOKENS),
        *(HeadPattern("vertical_slash", count, budget - count) for count in columns),
        HeadPattern("block_sparse", budget // key_block, 0),
    ]


def profile_heads(
    model: Model,
    tokens: TokenIds,
    *,
    budget: int,
    seed: int = 0,
    progress: Callable[[float], None] = lambda fraction: None,
) -> list[list[ProfiledHead]]:
    """The best pattern of each head, [layers][heads], over the segments of `tokens` that start at `budget` or later.

    The text goes through the model densely. Raises InvalidRequest: a budget under SMALLEST_BUDGET, a text too short to
    have such a segment. Raises ContextTooLong.
    """
    if budget < SMALLEST_BUDGET:
        raise InvalidRequest(f"budget: got {budget} tokens, expected at least {SMALLEST_BUDGET}")
    first = -(-budget // SEGMENT_TOKENS) * SEGMENT_TOKENS
    settings = SparseSettings("vertical_slash")
    if len(tokens) < first + settings.row_block:
        raise InvalidRequest(
            f"the text has {len(tokens)} tokens, a budget of {budget} needs at least {first + settings.row_block}"
        )
    if len(tokens) > model.spec.max_positions:
        raise ContextTooLong(len(tokens), model.spec.max_positions)
    with torch.inference_mode():
        return _Profile(model, tokens, settings, candidates(budget, settings.key_block), first, seed).run(progress)


class _Profile:
    def __init__(
        self,
        model: Model,
        tokens: TokenIds,
        settings: SparseSettings,
        patterns: list[HeadPattern],
        first: int,
        seed: int,
    ) -> None:
        self._model, self._settings, self._patterns, self._first = model, settings, patterns, first
        self._random = sampling.generator(seed)
        ids = torch.from_numpy(tokens.astype("int64")).to(model.device)
        self._hidden = torch.cat([forward.embed(model, ids[tile]) for tile in _tiles(len(ids))])

    def run(self, progress: Callable[[float], None]) -> list[list[ProfiledHead]]:
        layers = []
        for layer in range(self._model.spec.num_layers):
            layers.append(self._layer(layer))
            progress((layer + 1) / self._model.spec.num_layers)
        return layers

    def _layer(self, layer: int) -> list[ProfiledHead]:
        model, hidden, weights = self._model, self._hidden, self._model.layers[layer]
        parts = []
        for tile in _tiles(len(hidden)):
            at = forward.rotation(model, tile.start, tile.stop - tile.start)
            parts.append(forward.queries_keys_values(model, weights, hidden[tile], at))
        q, k, v = (torch.cat(part) for part in zip(*parts, strict=True))
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        attended, recalls = torch.empty_like(q), []
        for start in range(0, len(q), SEGMENT_TOKENS):
            end = min(start + SEGMENT_TOKENS, len(q))
            task = SegmentTask(layer, start, q[start:end], k[:, :end], v[:, :end], attended[start:end], 0)
            for _ in attend_dense(task):
                pass
            if start >= self._first and task.rows >= self._settings.row_block:
                recalls.append(self._recalls(task))
        for tile in _tiles(len(hidden)):
            hidden[tile] = forward.finish_layer(model, weights, hidden[tile], attended[tile])
        return self._best(torch.stack(recalls).mean(0))

    def _best(self, recalls: torch.Tensor) -> list[ProfiledHead]:
        """Of each head, recalls [patterns, heads]: the first as good as any, since the first need the least choice."""
        good = recalls >= recalls.amax(0) - _EQUAL
        which = good.int().argmax(0).tolist()
        return [ProfiledHead(self._patterns[first], float(recalls[first, head])) for head, first in enumerate(which)]

    def _recalls(self, task: SegmentTask) -> torch.Tensor:
        """Mean softmax mass kept of one segment's held-out rows: [patterns, heads]."""
        settings, heads, device = self._settings, task.q.shape[1], task.q.device
        chosen = sampling.choice_rows(settings, heads, self._random)
        rows = sampling.guard_rows(settings, task.rows, chosen, self._random).to(device)
        masses = block_scores(
            task.q,
            task.k.repeat_interleave(heads // task.kv_heads, 0),
            chosen.to(device),
            row_block=settings.row_block,
            key_block=settings.key_block,
            row_offset=task.start,
        ).sum(2)
        held_out = block_masses(
            task.q,
            task.k,
            rows.view(task.kv_heads, -1),
            per_head=rows.shape[1],
            key_block=settings.key_block,
            row_offset=task.start,
            scale=task.q.shape[2] ** -0.5,
        ).view(*rows.shape, -1)
        row_blocks = masses.shape[0]
        ends = ((torch.arange(row_blocks, device=device) + 1) * settings.row_block).clamp(max=task.rows) + task.start
        causal = -(-ends // settings.key_block)
        row_block, head = rows.long() // settings.row_block, torch.arange(heads, device=device)[:, None]
        kept = []
        for pattern in self._patterns:
            mask = fixed.fixed_mask(settings, [pattern] * heads, masses, causal)
            kept.append((held_out * mask[row_block, head]).sum(-1).mean(1))
        return torch.stack(kept)


def _tiles(rows: int) -> list[slice]:
    return [slice(start, min(start + _TILE_ROWS, rows)) for start in range(0, rows, _TILE_ROWS)]
