"""What a choice of key blocks looks like: A-shape, vertical-slash, block-sparse or dense."""

import torch

_NAMES = ("dense", "a_shape", "vertical_slash", "block_sparse")
_DENSE_SHARE = 0.75
# A group is A-shape when so little of what it keeps lies outside sink and local window, and vertical-slash when
# columns and diagonals that most row blocks keep explain so much of the rest.
_OUTSIDE_SHARE = 0.15
_LINES_SHARE = 0.7
_LINE_KEPT = 0.6
_LOCAL_TOKENS = 1024


def classify(mask: torch.Tensor, causal: torch.Tensor, *, key_block: int) -> list[str]:
    """Pattern of each group in one segment.

    mask [row_blocks, groups, key_blocks] bool, causal [row_blocks]: blocks seen.
    """
    return pattern_names(pattern_codes(mask, causal, key_block=key_block))


def pattern_names(codes: torch.Tensor) -> list[str]:
    """The names of `pattern_codes`' codes [groups]; waits for the device."""
    return [_NAMES[code] for code in codes.tolist()]


def pattern_codes(mask: torch.Tensor, causal: torch.Tensor, *, key_block: int) -> torch.Tensor:
    """`classify` without a host sync: [groups] int64 for `pattern_names`."""
    row_blocks, _, key_blocks = mask.shape
    kept = mask.sum((0, 2))
    blocks = torch.arange(key_blocks, device=mask.device)
    window = causal[:, None] - _LOCAL_TOKENS // key_block
    outside = mask & ((blocks >= 1) & (blocks < window))[:, None]
    others = outside.sum((0, 2))
    columns = outside.float().mean(0) >= _LINE_KEPT  # [groups, key_blocks]
    # Block b of row block r lies causal[r] - 1 - b before its diagonal; the map is its own inverse.
    distance = causal[:, None] - 1 - blocks
    mirrored = distance.clamp(min=0)[:, None].expand_as(mask)
    by_distance = outside.gather(2, mirrored) & (distance >= 0)[:, None]
    diagonals = by_distance.sum(0) >= _LINE_KEPT * row_blocks
    on_diagonal = diagonals.expand_as(mask).gather(2, mirrored)
    explained = (outside & (columns | on_diagonal)).sum((0, 2))
    codes = torch.where(explained >= _LINES_SHARE * others, 2, 3)
    codes = torch.where(others <= _OUTSIDE_SHARE * kept, 1, codes)
    return torch.where(kept >= _DENSE_SHARE * causal.sum(), 0, codes)
