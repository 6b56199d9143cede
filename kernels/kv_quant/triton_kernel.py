"""KV quantisation in Triton: one program a (KV head, 128 tokens)."""

import torch
import triton
import triton.language as tl

from kernels.dispatch import Capability
from kernels.kv_quant.reference import LARGEST, SCALE_TOKENS


def unsupported(numbers: Capability) -> str | None:
    if numbers.device_type == "cuda" and numbers.compute < (8, 9):
        return f"compute capability {numbers.compute}, float8_e4m3fn needs (8, 9)"
    return None


@triton.jit
def quantise_kernel(x_ptr, stored_ptr, scales_ptr, rounded_ptr, stride_h, stride_t, stride_rh, stride_rt, tokens, tiles,
                    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
                    MOST: tl.constexpr, INTEGERS: tl.constexpr, ROUNDED: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    token = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    channel = tl.arange(0, BLOCK_D)[None, :]
    mask = (token < tokens) & (channel < HEAD_DIM)
    x = tl.load(x_ptr + head * stride_h + token * stride_t + channel, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(x), 1), 0)
    scale = tl.where(largest > 0, largest / MOST, 1.0)
    scaled = tl.minimum(tl.maximum(x / scale, -MOST), MOST)
    stored = tl.floor(scaled + 0.5).to(tl.int8) if INTEGERS else scaled.to(tl.float8e4nv)
    tl.store(stored_ptr + (head * tokens + token) * HEAD_DIM + channel, stored, mask=mask)
    if ROUNDED:
        value = (stored.to(tl.float32) * scale).to(rounded_ptr.dtype.element_ty)
        tl.store(rounded_ptr + head * stride_rh + token * stride_rt + channel, value, mask=mask)
    tl.store(scales_ptr + head * tiles + tile, scale)


@triton.jit
def dequantise_kernel(stored_ptr, scales_ptr, out_ptr, stride_sh, stride_st, stride_ch, stride_ct, stride_oh, stride_ot,
                      tokens, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    token = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    channel = tl.arange(0, BLOCK_D)[None, :]
    mask = (token < tokens) & (channel < HEAD_DIM)
    scale = tl.load(scales_ptr + head * stride_ch + tile * stride_ct)
    stored = tl.load(stored_ptr + head * stride_sh + token * stride_st + channel, mask=mask, other=0.0)
    value = stored.to(tl.float32) * scale
    tl.store(out_ptr + head * stride_oh + token * stride_ot + channel, value.to(out_ptr.dtype.element_ty), mask=mask)


def quantise_kv(x: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor, rounded: torch.Tensor | None) -> None:
    kv_heads, tokens, head_dim = x.shape
    tiles = triton.cdiv(tokens, SCALE_TOKENS)
    stride_rh, stride_rt = (0, 0) if rounded is None else rounded.stride()[:2]
    quantise_kernel[(tiles, kv_heads)](
        x, stored, scales, rounded, x.stride(0), x.stride(1), stride_rh, stride_rt, tokens, tiles,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), TOKENS=SCALE_TOKENS, MOST=LARGEST[stored.dtype],
        INTEGERS=stored.dtype == torch.int8, ROUNDED=rounded is not None, num_warps=8,
    )  # fmt: skip


def dequantise_kv(stored: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    kv_heads, tokens, head_dim = stored.shape
    dequantise_kernel[(triton.cdiv(tokens, SCALE_TOKENS), kv_heads)](
        stored, scales, out, stored.stride(0), stored.stride(1), scales.stride(0), scales.stride(1),
        out.stride(0), out.stride(1), tokens,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), TOKENS=SCALE_TOKENS, num_warps=8,
    )  # fmt: skip
