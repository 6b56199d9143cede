"""Root-mean-square normalisation on the CPU: PyTorch's own, which reads its input once."""

import torch
import torch.nn.functional as F

from kernels.rms_norm.reference import rms_norm_fp8

__all__ = ["rms_norm", "rms_norm_fp8"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, s)."""
    s = x if residual is None else x + residual
    return F.rms_norm(s, (s.shape[-1],), weight, eps), s
