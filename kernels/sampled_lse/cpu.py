"""Sampled log-sum-exps on the CPU: both come from the sums over single key blocks, in one pass over the keys."""

import torch

from kernels.block_lists import BlockLists, mask_from_lists
from kernels.block_lse.cpu import natural_block_lse, unsupported

__all__ = ["sampled_lse", "unsupported"]


def sampled_lse(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, lists: BlockLists, row_offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(lse_all, lse_kept)."""
    if q.dtype == torch.float64:
        q, k = q.float(), k.float()
    heads, samples = rows.shape
    kv_heads = k.shape[0]
    rows = rows.long()
    sampled = q[rows, torch.arange(heads)[:, None]].view(kv_heads, -1, q.shape[2])
    positions = rows.view(kv_heads, -1) + row_offset
    lse = natural_block_lse(sampled, k, positions, lists.key_block, scale).view(heads, samples, -1)
    kept = mask_from_lists(lists, lse.shape[-1])
    list_head = torch.arange(heads)[:, None] // (heads // lists.list_heads)
    kept_lse = lse.masked_fill(~kept[rows // lists.row_block, list_head], float("-inf"))
    return lse.logsumexp(-1), kept_lse.logsumexp(-1)
