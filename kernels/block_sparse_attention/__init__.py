"""Causal attention over chosen key blocks."""

import torch

from kernels import checks, dispatch
from kernels.block_lists import BlockLists


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: BlockLists,
    *,
    row_offset: int = 0,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of each row over the keys of its row block's list that are not in its future.

    q [tokens, heads, head_dim], k and v [kv_heads, k_tokens, head_dim]; strides are free but for a dense last
    dimension. Row i stands at position row_offset + i and sees keys 0 … row_offset + i; keys from
    row_offset + tokens on are never read. `lists` has ceil(tokens / row_block) row blocks, counted from the first
    row of q; its list heads are the KV heads or the query heads (or a number between that divides them); every block
    listed starts before row_offset + tokens. `scale` defaults to head_dim ** -0.5.

    Returns (out [tokens, heads, head_dim] in q's dtype, lse [tokens, heads] float32: the natural logarithm of the
    sum of exponentials). A row without any key gets 0 and -inf. `out` is written in place when given.

    Raises ValueError for shapes, dtypes, devices or lists that do not fit together.
    """
    checks.attention(q, k, v, row_offset)
    tokens, heads, head_dim = q.shape
    checks.same_device(q=q, offsets=lists.offsets)
    if lists.row_blocks != -(-tokens // lists.row_block):
        raise ValueError(
            f"lists: expected {-(-tokens // lists.row_block)} row blocks of {lists.row_block} for {tokens} rows, "
            f"got {lists.row_blocks}"
        )
    if heads % lists.list_heads or lists.list_heads % k.shape[0]:
        raise ValueError(
            f"lists: expected list heads between {k.shape[0]} KV heads and {heads} heads, dividing them, "
            f"got {lists.list_heads}"
        )
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        checks.shape("out", out, tokens, heads, head_dim)
        checks.dtype("out", out, q.dtype)
        checks.same_device(q=q, out=out)
        checks.rows_contiguous(out=out)
    end = row_offset + tokens
    lse: torch.Tensor = dispatch.implementation("block_sparse_attention", q.device).block_sparse_attention(
        q, k[:, :end], v[:, :end], lists, row_offset, checks.scale(scale, head_dim), out
    )
    return out, lse
