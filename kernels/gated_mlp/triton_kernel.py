"""The gated feed-forward network on a GPU: the activation in Triton, the residual added inside the last product."""

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
    if down_bias is not None:
        residual = residual + down_bias
    return torch.addmm(residual, swiglu(F.linear(x, gate_up, gate_up_bias)), down.T)
