"""The feed-forward network with its gate and its residual."""

import torch

from kernels import checks, dispatch


def gated_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    residual: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + down(silu(gate(x)) * up(x)): [rows, hidden] of the dtype of x.

    x and residual [rows, hidden], gate_up [2 * inter, hidden] (gate first), down [hidden, inter], biases [2 * inter]
    and [hidden]; all of one dtype.

    Raises ValueError for shapes, dtypes or devices that do not fit together.
    """
    checks.shape("x", x, "rows", "hidden")
    checks.dtype("x", x, *checks.FLOATS)
    hidden = x.shape[1]
    checks.shape("gate_up", gate_up, "2 * inter", hidden)
    if gate_up.shape[0] % 2:
        raise ValueError(f"gate_up: expected an even first dimension, got {list(gate_up.shape)}")
    checks.shape("down", down, hidden, gate_up.shape[0] // 2)
    checks.shape("residual", residual, *x.shape)
    for name, tensor in (("gate_up", gate_up), ("down", down), ("residual", residual)):
        checks.dtype(name, tensor, x.dtype)
    checks.same_device(x=x, gate_up=gate_up, down=down, residual=residual)
    result: torch.Tensor = dispatch.implementation("gated_mlp", x.device).gated_mlp(
        x, gate_up, down, residual, gate_up_bias, down_bias
    )
    return result
