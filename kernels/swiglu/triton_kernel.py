"""SwiGLU in Triton: one program a row when the row gets an FP8 scale, one program a piece of a row otherwise."""

import torch
import triton
import triton.language as tl

from kernels.launch import lacks_fp8
from kernels.row_scale import store_fp8_row
from kernels.swiglu import reference


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, scale_ptr, inter, FP8: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < inter
    gate = tl.load(gate_up_ptr + row * 2 * inter + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * inter + inter + at, mask=mask, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if FP8:
        store_fp8_row(out_ptr + row * inter, scale_ptr + row, value, at, mask)
    else:
        tl.store(out_ptr + row * inter + at, value.to(out_ptr.dtype.element_ty), mask=mask)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    inter = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], inter, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(2048, triton.next_power_of_2(inter))
        grid = (out.numel() // inter, triton.cdiv(inter, block))
        swiglu_kernel[grid](gate_up, out, None, inter, FP8=False, BLOCK=block, num_warps=4)
    return out


def swiglu_fp8(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if lacks_fp8(gate_up.device):
        return reference.swiglu_fp8(gate_up)
    inter = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], inter, dtype=torch.float8_e4m3fn, device=gate_up.device)
    row_scale = torch.empty(*gate_up.shape[:-1], 1, dtype=torch.float32, device=gate_up.device)
    if out.numel():
        block = triton.next_power_of_2(inter)
        swiglu_kernel[(out.numel() // inter, 1)](
            gate_up, out, row_scale, inter, FP8=True, BLOCK=block, num_warps=max(1, min(16, block // 512))
        )
    return out, row_scale
