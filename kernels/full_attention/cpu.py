"""Attention without a mask on the CPU: a group's rows packed into one, keys split so that every thread has work."""

import torch

from kernels.dispatch import Capability
from kernels.flash_cpu import flash, flash_batch, obstacle, pack, unpack

_SPLIT_KEYS = 2048
_FEW_ROWS = 32  # packed; below it the fused kernel has one task a head, too few for its threads


def unsupported(numbers: Capability) -> str | None:
    return obstacle()


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse)."""
    dtype = q.dtype
    if dtype == torch.float64:
        q, k, v = q.float(), k.float(), v.float()
    kv_heads, keys, _ = k.shape
    packed = pack(q, kv_heads)
    splits = keys // _SPLIT_KEYS
    if packed.shape[1] > _FEW_ROWS or splits < 2:
        out, lse = flash(packed, k, v, scale=scale)
    else:
        out, lse = _split(packed, k, v, splits, scale)
    out, lse = unpack(out, lse, q.shape[1] // kv_heads)
    return out.to(dtype), lse


def _split(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, splits: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equal runs of keys as a batch, the rest with the last; merged by their log-sum-exps."""
    kv_heads, keys, head_dim = k.shape
    size = keys // splits
    parts_k, parts_v = (x[:, : splits * size].view(kv_heads, splits, size, head_dim).transpose(0, 1) for x in (k, v))
    out, lse = flash_batch(q.expand(splits, *q.shape), parts_k, parts_v, scale=scale)
    if keys > splits * size:
        rest, rest_lse = flash(q, k[:, splits * size :], v[:, splits * size :], scale=scale)
        out, lse = torch.cat((out, rest[None])), torch.cat((lse, rest_lse[None]))
    both = lse.logsumexp(0)
    return ((lse - both).exp()[..., None] * out).sum(0), both
