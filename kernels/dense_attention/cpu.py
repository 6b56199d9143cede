"""Dense causal attention on the CPU: an unmasked past and a causal diagonal, merged by their log-sum-exps.

The result of a row depends on where its call starts, so callers that need equal bits start at equal positions.
"""

import torch

from kernels.dispatch import Capability
from kernels.flash_cpu import flash, merge, obstacle


def unsupported(numbers: Capability) -> str | None:
    return obstacle()


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse)."""
    rows, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(rows, heads, dtype=torch.float32)
    if q.dtype == torch.float64:
        q, k, v = q.float(), k.float(), v.float()
    group = heads // k.shape[0]
    # One KV head at a time: then everything lies in memory as [rows, group, head_dim], and nothing is transposed.
    for head in range(k.shape[0]):
        own = slice(head * group, (head + 1) * group)
        queries, keys, values = q[:, own], k[head : head + 1], v[head : head + 1]
        result, result_lse = diagonal(
            queries, keys[:, row_offset : row_offset + rows], values[:, row_offset : row_offset + rows], scale
        )
        if row_offset:
            far = packed(queries, keys[:, :row_offset], values[:, :row_offset], scale)
            result, result_lse = merge(result, result_lse, *far)
        out[:, own], lse[:, own] = result, result_lse
    return out, lse


def diagonal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a group's rows to their own keys: q [rows, group, head_dim], k and v [1, rows, head_dim].

    Returns (out [rows, group, head_dim], lse [rows, group]).
    """
    group = q.shape[1]
    out, lse = flash(q.transpose(0, 1), k.expand(group, -1, -1), v.expand(group, -1, -1), scale=scale, causal=True)
    return out.transpose(0, 1), lse.T


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a group's rows to keys that all of them see; the group's rows share a pass over the keys.

    Shapes as in `diagonal`, but for k and v [1, keys, head_dim].
    """
    rows, group, head_dim = q.shape
    out, lse = flash(q.reshape(1, rows * group, head_dim), k, v, scale=scale)
    return out[0].view(rows, group, head_dim), lse[0].view(rows, group)
