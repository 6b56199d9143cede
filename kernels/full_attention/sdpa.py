"""Unmasked attention through PyTorch's FlashAttention-2."""

import torch

from kernels.dispatch import Capability


def unsupported(numbers: Capability) -> str | None:
    if numbers.compute < (8, 0):
        return f"compute capability {numbers.compute}, flash attention needs (8, 0)"
    return None


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return flash(q, k, v, False, scale)


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [tokens, heads, head_dim], lse [tokens, heads]). The kernel knows no groups: KV is repeated for it."""
    group = q.shape[1] // k.shape[0]
    keys, values = (t.repeat_interleave(group, 0)[None] for t in (k, v))
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        q.transpose(0, 1)[None], keys, values, 0.0, causal, False, scale=scale
    )
    return result[0][0].transpose(0, 1), result[1][0].T
