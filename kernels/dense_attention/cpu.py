"""Dense causal attention on the CPU: an unmasked past and a causal diagonal, merged by their log-sum-exps."""

from functools import partial

import torch

from kernels.cpu_workers import run_all
from kernels.dispatch import Capability
from kernels.flash_cpu import flash, merge, obstacle, pack, unpack

# Rows of a tile, whole and where there is only one. Packed with their group they keep the fused kernel busy, and each
# (tile, KV head) is a piece of work for one thread. The result of a row depends on the tile's shape, so callers that
# need equal bits start their calls at equal positions.
_TILE = 512
_HALF_TILE = 256


def unsupported(numbers: Capability) -> str | None:
    return obstacle()


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse)."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    if q.dtype == torch.float64:
        q, k, v = q.float(), k.float(), v.float()
    group = q.shape[1] // k.shape[0]
    size = _TILE if q.shape[0] > _TILE else _HALF_TILE

    def tile(start: int, head: int) -> None:
        rows, heads = slice(start, start + size), slice(head * group, (head + 1) * group)
        result, lse[rows, heads] = _tile(
            q[rows, heads], k[head : head + 1], v[head : head + 1], row_offset + start, scale
        )
        out[rows, heads] = result.to(out.dtype)

    run_all(partial(tile, start, head) for start in range(0, q.shape[0], size) for head in range(k.shape[0]))
    return out, lse


def _tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One tile of one KV head's group: q [rows, group, head_dim], k and v [1, k_tokens, head_dim]."""
    rows, group, _ = q.shape
    near, near_lse = diagonal(q, k[:, past : past + rows], v[:, past : past + rows], scale)
    if past == 0:
        return near, near_lse
    far, far_lse = unpack(*flash(pack(q, 1), k[:, :past], v[:, :past], scale=scale), group)
    return merge(near, near_lse, far, far_lse)


def diagonal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of rows to their own keys. q [rows, heads, head_dim], k and v [kv_heads, rows, head_dim]."""
    group = q.shape[1] // k.shape[0]
    keys, values = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    out, lse = flash(q.transpose(0, 1), keys, values, scale=scale, causal=True)
    return out.transpose(0, 1), lse.T
