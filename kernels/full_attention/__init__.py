"""Attention without a mask: rows over keys that all lie in their past."""

import torch

from kernels import checks, dispatch


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of every row over all keys, to be merged with attention over others by the log-sum-exps.

    q [tokens, heads, head_dim], k and v [kv_heads, k_tokens, head_dim]. Returns (out [tokens, heads, head_dim] in q's
    dtype, lse [tokens, heads] float32, natural logarithm).

    Raises ValueError for shapes, dtypes or devices that do not fit together.
    """
    checks.shape("q", q, "tokens", "heads", "head_dim")
    checks.dtype("q", q, *checks.FLOATS)
    checks.at_least("tokens", q.shape[0], 1)
    head_dim = q.shape[2]
    checks.shape("k", k, "kv_heads", "k_tokens", head_dim)
    checks.shape("v", v, *k.shape)
    checks.dtype("k", k, q.dtype)
    checks.dtype("v", v, q.dtype)
    checks.at_least("k_tokens", k.shape[1], 1)
    if k.shape[0] < 1 or q.shape[1] % k.shape[0]:
        raise ValueError(f"heads: expected a multiple of {k.shape[0]} KV heads, got {q.shape[1]}")
    checks.same_device(q=q, k=k, v=v)
    checks.rows_contiguous(q=q, k=k, v=v)
    result: tuple[torch.Tensor, torch.Tensor] = dispatch.implementation("full_attention", q.device).full_attention(
        q, k, v, checks.scale(scale, head_dim)
    )
    return result
