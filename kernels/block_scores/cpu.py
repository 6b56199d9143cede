"""Block scores on the CPU, from the softmax masses of the sampled rows."""

import torch

from kernels.block_lse.cpu import masses_of_rows, unsupported

__all__ = ["block_scores", "unsupported"]


def block_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    sample_offsets: torch.Tensor,
    row_block: int,
    key_block: int,
    row_offset: int,
    scale: float,
) -> torch.Tensor:
    """masses [row_blocks, kv_heads, 2, key_blocks]."""
    if q.dtype == torch.float64:
        q, k = q.float(), k.float()
    tokens, heads, head_dim = q.shape
    kv_heads, k_tokens, _ = k.shape
    group, samples = heads // kv_heads, sample_offsets.shape[2]
    row_blocks, key_blocks = -(-tokens // row_block), -(-k_tokens // key_block)
    starts = torch.arange(row_blocks) * row_block
    rows = (starts[:, None, None] + sample_offsets.long()).clamp(max=tokens - 1)  # [row_blocks, heads, samples]
    sampled = q[rows, torch.arange(heads)[:, None]]
    sampled = sampled.view(row_blocks, kv_heads, group * samples, head_dim).transpose(0, 1)
    packed = sampled.reshape(kv_heads, row_blocks * group * samples, head_dim)
    positions = rows.view(row_blocks, kv_heads, -1).transpose(0, 1).reshape(kv_heads, -1) + row_offset
    mass = masses_of_rows(packed, k, positions, key_block, scale)[0]
    mass = mass.view(kv_heads, row_blocks, group * samples, key_blocks)
    if group * samples % 2 == 0:
        return mass.unflatten(2, (-1, 2)).mean(2).transpose(0, 1).contiguous()
    fold = torch.arange(group * samples) % 2
    masses = torch.zeros(row_blocks, kv_heads, 2, key_blocks)
    for half in range(min(2, group * samples)):
        masses[:, :, half] = mass[:, :, fold == half].mean(2).transpose(0, 1)
    return masses
