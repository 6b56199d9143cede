"""FP8 rows in Triton: one program a row."""

import torch
import triton
import triton.language as tl

from kernels.launch import lacks_fp8
from kernels.row_quant import reference
from kernels.row_scale import store_fp8_row


@triton.jit
def row_quant_kernel(x_ptr, out_ptr, scale_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=mask, other=0.0).to(tl.float32)
    store_fp8_row(out_ptr + row * columns, scale_ptr + row, x, at, mask)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if lacks_fp8(x.device):
        return reference.quantise_rows(x)
    columns = x.shape[-1]
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    if x.numel():
        row_quant_kernel[(x.numel() // columns,)](
            x, out, scale, columns, BLOCK=block, num_warps=max(1, min(16, block // 512))
        )
    return out, scale
