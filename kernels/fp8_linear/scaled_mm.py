"""FP8 products through PyTorch's row-wise scaled matrix product (cuBLAS or CUTLASS).

`torch._scaled_mm` is a private name (present in torch 2.11 to 2.13): it is looked for, and the self-test tries it.
"""

import torch

from kernels.dispatch import Capability

_GRANULE = 16  # rows


def unsupported(numbers: Capability) -> str | None:
    if not hasattr(torch, "_scaled_mm"):
        return f"this PyTorch ({torch.__version__}) has no _scaled_mm"
    if numbers.compute < (8, 9):
        return f"compute capability {numbers.compute}, FP8 products need (8, 9)"
    return None


def fp8_linear(
    x: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    rows = x.shape[0]
    if rows % _GRANULE:
        padded = -(-rows // _GRANULE) * _GRANULE
        x8 = torch.zeros(padded, x.shape[1], dtype=x.dtype, device=x.device)
        x8[:rows] = x
        scale = torch.ones(padded, 1, dtype=torch.float32, device=x.device)
        scale[:rows] = row_scale
        result = torch.empty(padded, weight.shape[0], dtype=out.dtype, device=x.device)
        fp8_linear(x8, scale, weight, weight_scale, bias, result)
        out.copy_(result[:rows])
        return
    torch._scaled_mm(
        x,
        weight.T,
        scale_a=row_scale,
        scale_b=weight_scale.T,
        bias=bias,
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=out,
    )
