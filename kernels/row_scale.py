"""FP8 rows with one scale each, as row-wise scaled matrix products take them: the device code."""

import triton
import triton.language as tl

_FP8_MAX = tl.constexpr(448.0)  # largest float8_e4m3fn


@triton.jit
def store_fp8_row(out_ptr, scale_ptr, row, at, mask):
    """Store `row` / scale as float8_e4m3fn and scale = largest magnitude / 448 (1 for a row of zeros)."""
    largest = tl.max(tl.abs(row))
    scale = tl.where(largest > 0, largest / _FP8_MAX, 1.0)
    scaled = tl.minimum(tl.maximum(row / scale, -_FP8_MAX), _FP8_MAX)
    tl.store(out_ptr + at, scaled.to(tl.float8e4nv), mask=mask)
    tl.store(scale_ptr, scale)
