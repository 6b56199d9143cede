"""The gated feed-forward network by three plain products."""

import torch
import torch.nn.functional as F

from kernels.swiglu import swiglu


def gated_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    return residual + F.linear(swiglu(F.linear(x, gate_up, gate_up_bias)), down, down_bias)
