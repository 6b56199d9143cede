"""Dense causal attention in plain PyTorch, in slices of rows."""

import torch

_ROWS = 256


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse); computed in float64 when q is float64, otherwise in float32."""
    group = q.shape[1] // k.shape[0]
    compute = torch.promote_types(q.dtype, torch.float32)
    keys, values = k.to(compute).repeat_interleave(group, 0), v.to(compute).repeat_interleave(group, 0)
    outs, lses = [], []
    for start in range(0, q.shape[0], _ROWS):
        rows = q[start : start + _ROWS].to(compute).transpose(0, 1)
        scores = rows @ keys.transpose(1, 2) * scale
        positions = torch.arange(start, start + rows.shape[1], device=q.device) + row_offset
        future = torch.arange(k.shape[1], device=q.device) > positions[:, None]
        scores = scores.masked_fill(future, float("-inf"))
        lse = scores.logsumexp(-1)
        outs.append(((scores - lse[..., None]).exp() @ values).transpose(0, 1))
        lses.append(lse.T)
    return torch.cat(outs).to(q.dtype), torch.cat(lses).float()
