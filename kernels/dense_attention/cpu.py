"""Dense causal attention on the CPU: an unmasked past and a causal diagonal, merged by their log-sum-exps.

The result of a row depends on where its call starts, so callers that need equal bits start at equal positions.
"""

import torch

from kernels.dispatch import Capability
from kernels.flash_cpu import flash_batch, merge, obstacle


def unsupported(numbers: Capability) -> str | None:
    return obstacle()


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse)."""
    rows, heads, head_dim = q.shape
    kv_heads, group = k.shape[0], heads // k.shape[0]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.dtype == torch.float64:
        q, k, v = q.float(), k.float(), v.float()
    # KV heads are the batch: then all results lie in memory as [kv_heads, rows, group, head_dim].
    queries = q.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    own = (t[:, None, row_offset : row_offset + rows].expand(-1, group, -1, -1) for t in (k, v))
    result, lse = flash_batch(queries, *own, scale=scale, causal=True)
    result, lse = result.transpose(1, 2), lse.transpose(1, 2)
    if row_offset:
        packed = queries.transpose(1, 2).reshape(kv_heads, 1, rows * group, head_dim)
        far, far_lse = flash_batch(packed, k[:, None, :row_offset], v[:, None, :row_offset], scale=scale)
        result, lse = merge(result, lse, far.view(kv_heads, rows, group, head_dim), far_lse.view(kv_heads, rows, group))
    out.view(rows, kv_heads, group, head_dim).copy_(result.transpose(0, 1))
    return out, lse.transpose(0, 1).reshape(rows, heads)
