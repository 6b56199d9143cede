"""RMSNorm in plain PyTorch."""

import torch

FP8_MAX = 448.0


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x if residual is None else x + residual
    return _normed(total, weight, eps).to(x.dtype), total


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x if residual is None else x + residual
    return *quantise_rows(_normed(total, weight, eps)), total


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / row_scale as float8_e4m3fn, row_scale [..., 1] float32); a row of zeros has scale 1."""
    largest = x.abs().amax(-1, keepdim=True)
    row_scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return (x / row_scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), row_scale.float()


def _normed(total: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    compute = torch.promote_types(total.dtype, torch.float32)
    values = total.to(compute)
    return values * (values.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(compute)
