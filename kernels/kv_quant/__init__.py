"""KV as FP8 or INT8 with one scale per 128 tokens and KV head, and back."""

import torch

from kernels import checks, dispatch
from kernels.kv_quant.reference import LARGEST

SCALE_TOKENS = 128
STORED_DTYPES = tuple(LARGEST)


def quantise_kv(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    stored: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    rounded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise K or V of one layer, [kv_heads, tokens, head_dim]; K's heads and V's may be given as one run of heads.

    Returns (stored [kv_heads, tokens, head_dim] of `dtype`, float8_e4m3fn or int8, scales [kv_heads,
    ceil(tokens / 128)] float32): value ≈ stored * scale, scale = largest magnitude of those 128 tokens / 448, or / 127
    for int8 (1 where all are 0). Both are written in place where given (dense; `stored` then says the dtype), and so
    are the values that they stand for, into `rounded` [kv_heads, tokens, head_dim], which may be x itself.

    Raises ValueError for shapes, dtypes, devices or strides that do not fit.
    """
    checks.shape("x", x, "kv_heads", "tokens", "head_dim")
    checks.dtype("x", x, *checks.FLOATS)
    checks.at_least("tokens", x.shape[1], 1)
    checks.rows_contiguous(x=x, rounded=rounded)
    shape = (x.shape[0], -(-x.shape[1] // SCALE_TOKENS))
    if stored is None:
        stored = torch.empty(x.shape, dtype=dtype, device=x.device)
    if scales is None:
        scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    checks.shape("stored", stored, *x.shape)
    checks.dtype("stored", stored, *STORED_DTYPES)
    checks.shape("scales", scales, *shape)
    checks.dtype("scales", scales, torch.float32)
    if rounded is not None:
        checks.shape("rounded", rounded, *x.shape)
        checks.dtype("rounded", rounded, x.dtype)
    for name, tensor in (("stored", stored), ("scales", scales)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a dense tensor, got strides {tensor.stride()}")
    checks.same_device(x=x, stored=stored, scales=scales, rounded=rounded)
    dispatch.implementation("kv_quant", x.device).quantise_kv(x, stored, scales, rounded)
    return stored, scales


def dequantise_kv(
    stored: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The values that `stored` [kv_heads, tokens, head_dim] and `scales` [kv_heads, ceil(tokens / 128)] stand for.

    Written into `out` [kv_heads, tokens, head_dim] of `dtype` when given (a slice of a layer's KV, say).

    Raises ValueError for shapes, dtypes, devices or strides that do not fit.
    """
    checks.shape("stored", stored, "kv_heads", "tokens", "head_dim")
    checks.dtype("stored", stored, *STORED_DTYPES)
    checks.shape("scales", scales, stored.shape[0], -(-stored.shape[1] // SCALE_TOKENS))
    checks.dtype("scales", scales, torch.float32)
    if dtype not in checks.FLOATS:
        raise ValueError(f"dtype: expected one of {checks.FLOATS}, got {dtype}")
    if out is None:
        out = torch.empty(stored.shape, dtype=dtype, device=stored.device)
    checks.shape("out", out, *stored.shape)
    checks.dtype("out", out, dtype)
    checks.same_device(stored=stored, scales=scales, out=out)
    checks.rows_contiguous(stored=stored, out=out)
    dispatch.implementation("kv_quant", stored.device).dequantise_kv(stored, scales, out)
    return out
