"""Block-wise log-sum-exp in plain PyTorch."""

import math

import torch


def block_lse(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, per_head: int, key_block: int, row_offset: int, scale: float
) -> torch.Tensor:
    """Computed in float64 when q is float64, otherwise in float32."""
    kv_heads, k_tokens, _ = k.shape
    samples, group = rows.shape[1], q.shape[1] // kv_heads
    compute = torch.promote_types(q.dtype, torch.float32)
    head = torch.arange(samples, device=q.device) // per_head % group
    head = head + torch.arange(kv_heads, device=q.device)[:, None] * group
    scores = q[rows.long(), head].to(compute) @ k.to(compute).transpose(1, 2) * scale
    future = torch.arange(k_tokens, device=q.device) > rows[..., None] + row_offset
    scores = scores.masked_fill(future, float("-inf"))
    scores = torch.nn.functional.pad(scores, (0, -k_tokens % key_block), value=float("-inf"))
    blocks = scores.view(kv_heads, samples, -1, key_block).logsumexp(-1) / math.log(2)
    return blocks.transpose(1, 2).float().contiguous()
