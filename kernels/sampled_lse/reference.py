"""Sampled log-sum-exps in plain PyTorch."""

import torch

from kernels.block_lists import BlockLists, mask_from_lists


def sampled_lse(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, lists: BlockLists, row_offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(lse_all, lse_kept); computed in float64 when q is float64, otherwise in float32."""
    heads, kv_heads, k_tokens = q.shape[1], k.shape[0], k.shape[1]
    compute = torch.promote_types(q.dtype, torch.float32)
    keep = mask_from_lists(lists, -(-k_tokens // lists.key_block))
    rows = rows.long()
    lse_all, lse_kept = [], []
    for head in range(heads):
        scores = q[rows[head], head].to(compute) @ k[head // (heads // kv_heads)].to(compute).T * scale
        future = torch.arange(k_tokens, device=q.device) > rows[head, :, None] + row_offset
        scores = scores.masked_fill(future, float("-inf"))
        kept = keep[rows[head] // lists.row_block, head // (heads // lists.list_heads)]
        kept = kept.repeat_interleave(lists.key_block, 1)[:, :k_tokens]
        lse_all.append(scores.logsumexp(-1))
        lse_kept.append(scores.masked_fill(~kept, float("-inf")).logsumexp(-1))
    return torch.stack(lse_all).float(), torch.stack(lse_kept).float()
