"""The gated feed-forward network on the CPU: activation, gate and residual are done inside the products by oneDNN.

`torch.ops.mkldnn._linear_pointwise` is a private name (present in torch 2.11 to 2.13), so it is looked for and tried
once a dtype; without it the reference runs.
"""

from functools import cache

import torch

from kernels.dispatch import Capability
from kernels.gated_mlp import reference

_OP = "_linear_pointwise"


def unsupported(numbers: Capability) -> str | None:
    return obstacle(torch.float32)


@cache
def obstacle(dtype: torch.dtype) -> str | None:
    """Why the fused products can't be used in `dtype` here, None where they can."""
    if not hasattr(torch.ops.mkldnn, _OP):
        return f"this PyTorch ({torch.__version__}) has no mkldnn::{_OP}"
    x = torch.linspace(-1, 1, 4 * 8).view(4, 8).to(dtype)
    weights = torch.linspace(-1, 1, 12 * 8).view(12, 8).to(dtype)
    down = torch.linspace(1, -1, 8 * 6).view(8, 6).to(dtype)
    try:
        got = _fused(x, weights, down, x, None, None)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"mkldnn::{_OP} does not take these arguments: {error}"
    if not torch.allclose(got, reference.gated_mlp(x, weights, down, x, None, None), rtol=0.05, atol=0.05):
        return f"mkldnn::{_OP} gives another result than expected"
    return None


def gated_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    """silu is applied to the float32 sums, and so is the gate."""
    run = _fused if obstacle(x.dtype) is None else reference.gated_mlp
    return run(x, gate_up, down, residual, gate_up_bias, down_bias)


def _fused(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    linear = getattr(torch.ops.mkldnn, _OP)
    gate_weight, up_weight = gate_up.chunk(2)
    gate_bias, up_bias = (None, None) if gate_up_bias is None else gate_up_bias.chunk(2)
    gate = linear(x, gate_weight, gate_bias, "swish", [], "")
    gated = linear.binary(x, gate, up_weight, up_bias, "mul")
    result: torch.Tensor = linear.binary(gated, residual, down, down_bias, "add")
    return result
