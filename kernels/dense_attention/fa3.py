"""Dense causal attention through FlashAttention-3 (the `fa3-fwd` distribution), when it is installed."""

import torch
from fa3_fwd_interface import flash_attn_func

from kernels.dispatch import Capability


def unsupported(numbers: Capability) -> str | None:
    if numbers.compute[0] != 9:
        return f"compute capability {numbers.compute}, FlashAttention-3 needs 9.x"
    return None


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse). The causal mask is aligned to the last key, which is row_offset + tokens - 1 here."""
    out, lse = flash_attn_func(
        q[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        softmax_scale=scale,
        causal=True,
        return_attn_probs=True,
    )[:2]
    return out[0], lse[0].T
