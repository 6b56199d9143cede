"""The fixed policies' block lists: A-shape, vertical-slash and block-sparse by budgets in tokens.

The patterns are MInference's (Jiang et al. 2024); the estimate differs: from sampled rows of the whole segment, not
from the document's last rows, and at the granularity of key blocks.
"""

import torch

from engine.sparse.head_config import HeadPattern, Pattern
from engine.sparse.settings import SparseSettings


def head_patterns(settings: SparseSettings, layer: int, list_heads: int) -> list[HeadPattern]:
    """One pattern for each list head: the head config's, or the policy's own budgets for all."""
    if settings.head_config is not None:
        return list(settings.head_config.layers[layer])
    budgets: dict[Pattern, tuple[int, int]] = {
        "a_shape": (settings.a_shape_sink, settings.a_shape_local),
        "vertical_slash": (settings.vertical_tokens, settings.slash_tokens),
        "block_sparse": (settings.top_blocks, 0),
    }
    if settings.policy not in ("a_shape", "vertical_slash", "block_sparse"):
        raise ValueError(f"{settings.policy} has no fixed budgets")
    return [HeadPattern(settings.policy, *budgets[settings.policy])] * list_heads


def fixed_mask(
    settings: SparseSettings,
    patterns: list[HeadPattern],
    masses: torch.Tensor,
    causal: torch.Tensor,
) -> torch.Tensor:
    """Kept blocks [row_blocks, list_heads, key_blocks] bool.

    masses [row_blocks, list_heads, key_blocks] of sampled rows, causal [row_blocks]: key blocks that a row block sees.
    """
    blocks = torch.arange(masses.shape[2], device=masses.device)
    seen = blocks < causal[:, None]
    forced = seen & ((blocks < settings.sink_blocks) | (blocks >= causal[:, None] - settings.local_blocks))
    masses = masses.masked_fill(~seen[:, None], 0)
    heads = []
    for head, pattern in enumerate(patterns):
        if pattern.pattern == "a_shape":
            sink, local = (-(-tokens // settings.key_block) for tokens in (pattern.first, pattern.second))
            kept = (blocks < sink) | (blocks >= causal[:, None] - local)
        elif pattern.pattern == "vertical_slash":
            kept = _lines(masses[:, head], causal, pattern, settings.key_block)
        else:
            kept = _top(masses[:, head], pattern.first)
        heads.append((kept | forced) & seen)
    return torch.stack(heads, 1)


def _lines(masses: torch.Tensor, causal: torch.Tensor, pattern: HeadPattern, key_block: int) -> torch.Tensor:
    """The heaviest columns and diagonals of one head. masses [row_blocks, key_blocks]."""
    key_blocks = masses.shape[1]
    distance = causal[:, None] - 1 - torch.arange(key_blocks, device=masses.device)
    columns = _heaviest(masses.sum(0), -(-pattern.first // key_block))
    weights = torch.zeros(key_blocks, device=masses.device).scatter_add_(
        0, distance.clamp(min=0).flatten(), masses.flatten()
    )
    diagonals = _heaviest(weights, -(-pattern.second // key_block))
    return columns | diagonals[distance.clamp(min=0)]


def _top(masses: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` heaviest blocks of each row block."""
    chosen = masses.topk(min(count, masses.shape[1]), dim=1).indices
    return torch.zeros_like(masses, dtype=torch.bool).scatter_(1, chosen, True)


def _heaviest(weights: torch.Tensor, count: int) -> torch.Tensor:
    return _top(weights[None], count)[0]
