"""Root-mean-square normalisation on the CPU: few passes over rows that stay in the cache.

PyTorch's own is put together from twice as many.
"""

import torch

from kernels.rms_norm.reference import rms_norm_fp8

__all__ = ["rms_norm", "rms_norm_fp8"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, s)."""
    s = x if residual is None else x + residual
    wide = s.to(torch.promote_types(s.dtype, torch.float32))
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(s.shape[-1])
    inverse = mean_square.add_(eps).rsqrt_()
    normed = wide * inverse if wide is s else wide.mul_(inverse)
    return normed.mul_(weight.to(wide.dtype)).to(s.dtype), s
