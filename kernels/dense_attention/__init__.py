"""Dense causal attention: FlashAttention-3 or PyTorch's own kernels, by capability."""

import torch

from kernels import checks, dispatch


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    row_offset: int = 0,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of row i over keys 0 … row_offset + i.

    q [tokens, heads, head_dim], k and v [kv_heads, k_tokens, head_dim], keys from row_offset + tokens on are never
    read. Returns (out [tokens, heads, head_dim], lse [tokens, heads] float32, natural logarithm).

    Raises ValueError for shapes, dtypes or devices that do not fit together.
    """
    checks.attention(q, k, v, row_offset)
    end = row_offset + q.shape[0]
    result: tuple[torch.Tensor, torch.Tensor] = dispatch.implementation("dense_attention", q.device).dense_attention(
        q, k[:, :end], v[:, :end], row_offset, checks.scale(scale, q.shape[2])
    )
    return result
