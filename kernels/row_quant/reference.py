"""FP8 rows in plain PyTorch."""

import torch

from kernels.rms_norm import FP8_MAX


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = x.float().abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale
