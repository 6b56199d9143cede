"""What a choice of key blocks looks like: A-shape, vertical-slash, block-sparse or dense."""

import torch

_DENSE_SHARE = 0.75
# A group is A-shape when so little of what it keeps lies outside sink and local window, and vertical-slash when
# columns and diagonals that most row blocks keep explain so much of the rest.
_OUTSIDE_SHARE = 0.15
_LINES_SHARE = 0.7
_LINE_KEPT = 0.6
_LOCAL_TOKENS = 1024


def classify(mask: torch.Tensor, causal: torch.Tensor, *, key_block: int) -> str:
    """Pattern of one group in one segment. mask [row_blocks, key_blocks] bool, causal [row_blocks] blocks seen."""
    kept = int(mask.sum())
    if kept >= _DENSE_SHARE * int(causal.sum()):
        return "dense"
    blocks = torch.arange(mask.shape[1])
    local = _LOCAL_TOKENS // key_block
    outside = mask & (blocks >= 1) & (blocks < causal[:, None] - local)
    others = int(outside.sum())
    if others <= _OUTSIDE_SHARE * kept:
        return "a_shape"
    columns = outside.float().mean(0) >= _LINE_KEPT
    row, block = outside.nonzero(as_tuple=True)
    distance = causal[row] - 1 - block
    diagonals = torch.bincount(distance, minlength=mask.shape[1] + 1) >= _LINE_KEPT * mask.shape[0]
    explained = int((columns[block] | diagonals[distance]).sum())
    return "vertical_slash" if explained >= _LINES_SHARE * others else "block_sparse"
