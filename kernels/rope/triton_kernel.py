"""RoPE in Triton: one program a token, all its heads at once, in place."""

import torch
import triton
import triton.language as tl


@triton.jit
def rope_kernel(x_ptr, cos_ptr, sin_ptr, stride_t, stride_h, stride_ct, stride_st, heads, pairs,
                INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    head = tl.arange(0, HEADS)
    cos = tl.load(cos_ptr + token * stride_ct + pair, mask=pair < pairs, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * stride_st + pair, mask=pair < pairs, other=0.0).to(tl.float32)[None, :]
    mask = (head < heads)[:, None] & (pair < pairs)[None, :]
    base = x_ptr + token * stride_t + head.to(tl.int64)[:, None] * stride_h
    if INTERLEAVED:
        first, second = base + 2 * pair[None, :], base + 2 * pair[None, :] + 1
    else:
        first, second = base + pair[None, :], base + pairs + pair[None, :]
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    tl.store(first, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(second, (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask=mask)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    tokens, heads, _ = x.shape
    if tokens:
        rope_kernel[(tokens,)](
            x, cos, sin, x.stride(0), x.stride(1), cos.stride(0), sin.stride(0), heads, cos.shape[1],
            INTERLEAVED=interleaved, HEADS=triton.next_power_of_2(heads), PAIRS=triton.next_power_of_2(cos.shape[1]),
            num_warps=4,
        )  # fmt: skip
