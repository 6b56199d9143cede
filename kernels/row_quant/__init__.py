"""Rows as FP8 with one scale each: what a row-wise scaled matrix product takes."""

import torch

from kernels import checks, dispatch


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., columns] (dense) → (quantised [..., columns] float8_e4m3fn, row_scale [..., 1] float32).

    x ≈ quantised * row_scale, row_scale = largest magnitude of the row / 448 (1 where all are 0).

    Raises ValueError for dtypes or strides that do not fit.
    """
    checks.dtype("x", x, *checks.FLOATS)
    checks.at_least("columns", x.shape[-1], 1)
    if not x.is_contiguous():
        raise ValueError(f"x: expected a dense tensor, got strides {x.stride()}")
    result: tuple[torch.Tensor, torch.Tensor] = dispatch.implementation("row_quant", x.device).quantise_rows(x)
    return result
