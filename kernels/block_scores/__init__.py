"""How much softmax mass each key block holds, from a few exact sampled rows of every row block."""

import torch

from kernels import checks, dispatch


def block_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    sample_offsets: torch.Tensor,
    *,
    row_block: int,
    key_block: int,
    row_offset: int = 0,
    scale: float | None = None,
) -> torch.Tensor:
    """Mean softmax mass of every key block over the sampled rows of a row block and KV-head group, in two folds.

    q [tokens, heads, head_dim], k [kv_heads, k_tokens, head_dim]. sample_offsets [heads, samples] int32 in
    0 … row_block - 1: head h samples rows b * row_block + sample_offsets[h, j] of row block b (the last row of q where
    that lies behind it); or [row_blocks, heads, samples], where row blocks have offsets of their own. A sampled row's
    softmax is exact, over all its causal keys. Stagger the offsets over the heads: that finds more than equal ones do.

    Sample j of the group's g-th head belongs to fold (g * samples + j) % 2, so that one fold can order the blocks and
    the other, which took no part in that order, can measure (`select_blocks`).

    Returns masses [row_blocks, kv_heads, 2, key_blocks] float32, key_blocks = ceil((row_offset + tokens) / key_block):
    each fold sums to 1 (fold 1 is all 0 where group × samples is 1). Nothing else of that size is kept.

    Raises ValueError for shapes, dtypes or devices that do not fit together.
    """
    checks.attention(q, k, None, row_offset)
    checks.block_size("row_block", row_block)
    checks.block_size("key_block", key_block)
    if sample_offsets.dim() == 3:
        checks.shape("sample_offsets", sample_offsets, -(-q.shape[0] // row_block), q.shape[1], "samples")
    else:
        checks.shape("sample_offsets", sample_offsets, q.shape[1], "samples")
        sample_offsets = sample_offsets[None]
    checks.dtype("sample_offsets", sample_offsets, torch.int32)
    checks.at_least("samples", sample_offsets.shape[2], 1)
    checks.same_device(q=q, sample_offsets=sample_offsets)
    masses: torch.Tensor = dispatch.implementation("block_scores", q.device).block_scores(
        q,
        k[:, : row_offset + q.shape[0]],
        sample_offsets.contiguous(),
        row_block,
        key_block,
        row_offset,
        checks.scale(scale, q.shape[2]),
    )
    return masses
