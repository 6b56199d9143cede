"""Block-sparse attention in plain PyTorch: the meaning of the operation, one row block at a time."""

import torch

from kernels.block_lists import BlockLists, mask_from_lists


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: BlockLists,
    row_offset: int,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Writes `out`, returns lse. In float64 when q is float64, otherwise in float32."""
    tokens, heads, _ = q.shape
    kv_heads, k_tokens, _ = k.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    keep = mask_from_lists(lists, -(-k_tokens // lists.key_block))
    keys = k.to(compute).repeat_interleave(heads // kv_heads, 0)
    values = v.to(compute).repeat_interleave(heads // kv_heads, 0)
    for block in range(lists.row_blocks):
        rows = slice(block * lists.row_block, min((block + 1) * lists.row_block, tokens))
        seen = keep[block].repeat_interleave(lists.key_block, 1)[:, :k_tokens]
        seen = seen.repeat_interleave(heads // lists.list_heads, 0)[:, None]
        positions = torch.arange(rows.start, rows.stop, device=q.device) + row_offset
        causal = torch.arange(k_tokens, device=q.device) <= positions[:, None]
        scores = q[rows].to(compute).transpose(0, 1) @ keys.transpose(1, 2) * scale
        scores = scores.masked_fill(~(seen & causal), float("-inf"))
        row_lse = scores.logsumexp(-1)
        # exp(-inf - -inf) is NaN: a row without keys must give 0.
        weights = torch.where(row_lse.isneginf()[..., None], 0.0, (scores - row_lse[..., None]).exp())
        out[rows] = (weights @ values).transpose(0, 1).to(out.dtype)
        lse[rows] = row_lse.transpose(0, 1).float()
    return lse
