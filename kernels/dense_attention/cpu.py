"""Dense causal attention on the CPU: an unmasked past and a causal diagonal, merged by their log-sum-exps."""

import torch

from kernels.dispatch import Capability
from kernels.flash_cpu import flash, merge, obstacle, pack, unpack

# Rows of a tile. Packed with their group they keep the fused kernel busy; the result of a row depends on the tile's
# shape, so callers that need equal bits start their calls at multiples of it.
ROW_TILE = 512


def unsupported(numbers: Capability) -> str | None:
    return obstacle()


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse)."""
    if q.dtype == torch.float64:
        q, k, v = q.float(), k.float(), v.float()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    for start in range(0, q.shape[0], ROW_TILE):
        rows = slice(start, min(start + ROW_TILE, q.shape[0]))
        out[rows], lse[rows] = _tile(q[rows], k, v, row_offset + start, scale)
    return out, lse


def _tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, _ = q.shape
    near, near_lse = diagonal(q, k[:, past : past + rows], v[:, past : past + rows], scale)
    if past == 0:
        return near, near_lse
    kv_heads = k.shape[0]
    far, far_lse = unpack(*flash(pack(q, kv_heads), k[:, :past], v[:, :past], scale=scale), heads // kv_heads)
    return merge(near, near_lse, far, far_lse)


def diagonal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of rows to their own keys. q [rows, heads, head_dim], k and v [kv_heads, rows, head_dim]."""
    group = q.shape[1] // k.shape[0]
    keys, values = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    out, lse = flash(q.transpose(0, 1), keys, values, scale=scale, causal=True)
    return out.transpose(0, 1), lse.T
