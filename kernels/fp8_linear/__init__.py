"""Matrix products of FP8 rows with FP8 weights, each row and each output channel with a scale of its own."""

import torch

from kernels import checks, dispatch


def fp8_linear(
    x: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x * row_scale) @ (weight * weight_scale)ᵀ + bias as bfloat16 [rows, out].

    x [rows, in] float8_e4m3fn with row_scale [rows, 1] float32 (`quantise_rows`, `rms_norm_fp8`), weight [out, in]
    float8_e4m3fn with weight_scale [out, 1] float32, bias [out] bfloat16; in and out are multiples of 16. Written
    into `out` (dense) when given.

    Raises ValueError for shapes, dtypes or devices that do not fit together.
    """
    checks.shape("x", x, "rows", "in")
    checks.shape("weight", weight, "out", x.shape[1])
    checks.shape("row_scale", row_scale, x.shape[0], 1)
    checks.shape("weight_scale", weight_scale, weight.shape[0], 1)
    for name, tensor in (("x", x), ("weight", weight)):
        checks.dtype(name, tensor, torch.float8_e4m3fn)
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a dense tensor, got strides {tensor.stride()}")
    for name, tensor in (("row_scale", row_scale), ("weight_scale", weight_scale)):
        checks.dtype(name, tensor, torch.float32)
    for name, size in (("in", weight.shape[1]), ("out", weight.shape[0])):
        if size % 16:
            raise ValueError(f"{name}: expected a multiple of 16, got {size}")
    if bias is not None:
        checks.shape("bias", bias, weight.shape[0])
        checks.dtype("bias", bias, torch.bfloat16)
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    checks.shape("out", out, x.shape[0], weight.shape[0])
    checks.dtype("out", out, torch.bfloat16)
    checks.same_device(x=x, row_scale=row_scale, weight=weight, weight_scale=weight_scale, bias=bias, out=out)
    dispatch.implementation("fp8_linear", x.device).fp8_linear(x, row_scale, weight, weight_scale, bias, out)
    return out
