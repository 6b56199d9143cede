"""Root-mean-square normalisation, with the residual addition before it and the FP8 row scale behind it."""

import torch

from kernels import checks, dispatch

FP8_MAX = 448.0  # largest float8_e4m3fn


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise s = x + residual over its last dimension: s / sqrt(mean(s²) + eps) * weight, in float32 inside.

    x and residual [..., hidden] (dense), weight [hidden]. Returns (normed, s), both in x's dtype; s is x itself without
    a residual. s is rounded to x's dtype before it is normed, as two separate operations would.

    Raises ValueError for shapes, dtypes or devices that do not fit together.
    """
    _check(x, weight, residual)
    result: tuple[torch.Tensor, torch.Tensor] = dispatch.implementation("rms_norm", x.device).rms_norm(
        x, weight, eps, residual
    )
    return result


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rms_norm` whose result is float8_e4m3fn with one scale a row (normed ≈ quantised * row_scale).

    Returns (quantised [..., hidden] float8_e4m3fn, row_scale [..., 1] float32 = largest magnitude / 448, s).
    """
    _check(x, weight, residual)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = dispatch.implementation(
        "rms_norm", x.device
    ).rms_norm_fp8(x, weight, eps, residual)
    return result


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    checks.dtype("x", x, *checks.FLOATS)
    checks.at_least("hidden", x.shape[-1], 1)
    checks.shape("weight", weight, x.shape[-1])
    checks.dtype("weight", weight, *checks.FLOATS)
    if residual is not None:
        checks.shape("residual", residual, *x.shape)
        checks.dtype("residual", residual, x.dtype)
    checks.same_device(x=x, weight=weight, residual=residual)
    for name, tensor in (("x", x), ("weight", weight), ("residual", residual)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a dense tensor, got strides {tensor.stride()}")
