"""Attention without a mask in plain PyTorch."""

import torch


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse); computed in float64 when q is float64, otherwise in float32."""
    group = q.shape[1] // k.shape[0]
    compute = torch.promote_types(q.dtype, torch.float32)
    keys, values = k.to(compute).repeat_interleave(group, 0), v.to(compute).repeat_interleave(group, 0)
    scores = q.to(compute).transpose(0, 1) @ keys.transpose(1, 2) * scale
    return (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype), scores.logsumexp(-1).T.float()
