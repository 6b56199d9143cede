"""The exact softmax mass that sampled rows find in the kept key blocks: what the recall guard measures."""

import torch

from kernels import checks, dispatch
from kernels.block_lists import BlockLists


def sampled_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor,
    lists: BlockLists,
    *,
    row_offset: int = 0,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp of sampled rows' scores over all their causal keys and over those in their row block's list.

    q [tokens, heads, head_dim], k [kv_heads, k_tokens, head_dim], rows [heads, samples] int32: rows of q, each head
    its own, in any order. Recall of a sample is exp(lse_kept - lse_all).

    Returns (lse_all, lse_kept), each [heads, samples] float32, natural logarithm; -inf where nothing is kept. Rows
    outside 0 … tokens - 1 are clamped into it. Raises ValueError for shapes, dtypes, devices or lists that do not fit.
    """
    checks.attention(q, k, None, row_offset)
    tokens, heads, head_dim = q.shape
    checks.shape("rows", rows, heads, "samples")
    checks.dtype("rows", rows, torch.int32)
    checks.at_least("samples", rows.shape[1], 1)
    checks.same_device(q=q, rows=rows, offsets=lists.offsets)
    if lists.row_blocks != -(-tokens // lists.row_block):
        raise ValueError(f"lists: expected {-(-tokens // lists.row_block)} row blocks, got {lists.row_blocks}")
    if heads % lists.list_heads or lists.list_heads % k.shape[0]:
        raise ValueError(f"lists: {lists.list_heads} list heads do not fit {k.shape[0]} KV heads and {heads} heads")
    result: tuple[torch.Tensor, torch.Tensor] = dispatch.implementation("sampled_lse", q.device).sampled_lse(
        q,
        k[:, : row_offset + tokens],
        rows.clamp(0, tokens - 1).contiguous(),
        lists,
        row_offset,
        checks.scale(scale, head_dim),
    )
    return result
