"""Rotary position embedding of queries and keys."""

import torch

from kernels import checks, dispatch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first 2 * pairs channels of every head of x in place, and return x.

    x [tokens, heads, head_dim], any strides but a dense last dimension. cos and sin [tokens, pairs] float32 (never
    rounded to bfloat16: that ruins positions past some ten thousand). Pair i is channels (i, i + pairs), or
    (2 i, 2 i + 1) when `interleaved`. Channels from 2 * pairs on stay as they are.

    Raises ValueError for shapes, dtypes or devices that do not fit together.
    """
    checks.shape("x", x, "tokens", "heads", "head_dim")
    checks.dtype("x", x, *checks.FLOATS)
    checks.shape("cos", cos, x.shape[0], "pairs")
    checks.shape("sin", sin, *cos.shape)
    for name, table in (("cos", cos), ("sin", sin)):
        checks.dtype(name, table, torch.float32, torch.float64)
    if not 1 <= 2 * cos.shape[1] <= x.shape[2]:
        raise ValueError(f"cos: expected 1 to {x.shape[2] // 2} pairs for head_dim {x.shape[2]}, got {cos.shape[1]}")
    checks.same_device(x=x, cos=cos, sin=sin)
    checks.rows_contiguous(x=x, cos=cos, sin=sin)
    dispatch.implementation("rope", x.device).rope(x, cos, sin, interleaved)
    return x
