"""RMSNorm in Triton: one program a row, the row held in registers."""

import torch
import triton
import triton.language as tl

from kernels.launch import lacks_fp8
from kernels.rms_norm import reference
from kernels.row_scale import store_fp8_row


@triton.jit
def rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, scale_ptr, hidden, eps,
                    RESIDUAL: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < hidden
    x = tl.load(x_ptr + row * hidden + at, mask=mask, other=0.0)
    if RESIDUAL:
        x = x.to(tl.float32) + tl.load(residual_ptr + row * hidden + at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * hidden + at, x, mask=mask)
    value = x.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value) / hidden + eps)
    normed *= tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if FP8:
        store_fp8_row(out_ptr + row * hidden, scale_ptr + row, normed, at, mask)
    else:
        tl.store(out_ptr + row * hidden + at, normed.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(x)
    return out, _launch(x, weight, eps, residual, out, None)


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if lacks_fp8(x.device):
        return reference.rms_norm_fp8(x, weight, eps, residual)
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    row_scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    return out, row_scale, _launch(x, weight, eps, residual, out, row_scale)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    row_scale: torch.Tensor | None,
) -> torch.Tensor:
    hidden = x.shape[-1]
    total = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    if x.numel():
        rms_norm_kernel[(x.numel() // hidden,)](
            x, residual, weight, total, out, row_scale, hidden, eps, RESIDUAL=residual is not None,
            FP8=row_scale is not None, BLOCK=block, num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return total
