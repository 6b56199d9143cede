"""Unmasked attention through FlashAttention-3 (the `fa3-fwd` distribution), when it is installed."""

import torch
from fa3_fwd_interface import flash_attn_func

from kernels.dispatch import Capability


def unsupported(numbers: Capability) -> str | None:
    if numbers.compute[0] != 9:
        return f"compute capability {numbers.compute}, FlashAttention-3 needs 9.x"
    return None


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return flash(q, k, v, False, scale)


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [tokens, heads, head_dim], lse [tokens, heads])."""
    keys, values = (t.transpose(0, 1)[None] for t in (k, v))
    out, lse = flash_attn_func(q[None], keys, values, softmax_scale=scale, causal=causal, return_attn_probs=True)[:2]
    return out[0], lse[0].T
