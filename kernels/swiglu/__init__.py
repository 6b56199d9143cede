"""The gated activation of the feed-forward network."""

import torch

from kernels import checks, dispatch


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, in float32 inside. gate_up [..., 2 * inter] (dense; gate first) → [..., inter], same dtype.

    Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    _check(gate_up)
    result: torch.Tensor = dispatch.implementation("swiglu", gate_up.device).swiglu(gate_up)
    return result


def swiglu_fp8(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`swiglu` as float8_e4m3fn with one scale a row: ([..., inter] float8_e4m3fn, row_scale [..., 1] float32)."""
    _check(gate_up)
    result: tuple[torch.Tensor, torch.Tensor] = dispatch.implementation("swiglu", gate_up.device).swiglu_fp8(gate_up)
    return result


def _check(gate_up: torch.Tensor) -> None:
    checks.dtype("gate_up", gate_up, *checks.FLOATS)
    if gate_up.shape[-1] < 2 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: expected an even last dimension, got {list(gate_up.shape)}")
    if not gate_up.is_contiguous():
        raise ValueError(f"gate_up: expected a dense tensor, got strides {gate_up.stride()}")
