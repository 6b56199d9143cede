"""Block scores on the CPU: the fused attention's log-sum-exp over one key block is the block's mass."""

import torch

from kernels.dispatch import Capability
from kernels.flash_cpu import flash_batch, obstacle

_KEY_BLOCKS = 32  # key blocks in one call: the discarded outputs stay in the cache


def unsupported(numbers: Capability) -> str | None:
    return obstacle()


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
    group, samples = heads // kv_heads, sample_offsets.shape[1]
    row_blocks, key_blocks = -(-tokens // row_block), -(-k_tokens // key_block)
    starts = torch.arange(row_blocks) * row_block
    rows = (starts[:, None, None] + sample_offsets.long()).clamp(max=tokens - 1)  # [row_blocks, heads, samples]
    sampled = q[rows, torch.arange(heads)[:, None]]
    sampled = sampled.view(row_blocks, kv_heads, group * samples, head_dim).transpose(0, 1)
    packed = sampled.reshape(kv_heads, row_blocks * group * samples, head_dim)
    positions = rows.view(row_blocks, kv_heads, -1).transpose(0, 1).reshape(kv_heads, -1) + row_offset
    lse = block_lse(packed, k, positions, row_offset // key_block, key_block, scale)
    mass = (lse - lse.logsumexp(-1, keepdim=True)).exp_().view(kv_heads, row_blocks, group * samples, key_blocks)
    fold = torch.arange(group * samples) % 2
    masses = torch.zeros(row_blocks, kv_heads, 2, key_blocks)
    for half in range(min(2, group * samples)):
        masses[:, :, half] = mass[:, :, fold == half].mean(2).transpose(0, 1)
    return masses


def block_lse(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, past: int, key_block: int, scale: float
) -> torch.Tensor:
    """Log-sum-exp of rows over each key block: [kv_heads, rows, key_blocks] float32, −inf for the future.

    q [kv_heads, rows, head_dim] at `positions` [kv_heads, rows]; the first `past` blocks lie in every row's past.
    """
    kv_heads, k_tokens, _ = k.shape
    lse = torch.full((kv_heads, q.shape[1], -(-k_tokens // key_block)), float("-inf"))
    _past_blocks(q, k, past, key_block, scale, lse)
    _recent_blocks(q, k, positions, past, key_block, scale, lse)
    return lse


def _past_blocks(q: torch.Tensor, k: torch.Tensor, past: int, key_block: int, scale: float, lse: torch.Tensor) -> None:
    """Blocks wholly in every row's past: each is a batch entry, so that the kernel gives its log-sum-exp."""
    kv_heads, rows, head_dim = q.shape
    for first in range(0, past, _KEY_BLOCKS):
        count = min(_KEY_BLOCKS, past - first)
        keys = k[:, first * key_block : (first + count) * key_block].view(kv_heads, count, key_block, head_dim)
        keys = keys.transpose(0, 1)
        _, part = flash_batch(q.expand(count, kv_heads, rows, head_dim), keys, keys, scale=scale)
        lse[..., first : first + count] = part.permute(1, 2, 0)


def _recent_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    past: int,
    key_block: int,
    scale: float,
    lse: torch.Tensor,
) -> None:
    """Blocks that may hold keys in a row's future, with an explicit mask; `positions` [kv_heads, rows]."""
    first, end = past * key_block, k.shape[1]
    scores = torch.bmm(q, k[:, first:end].transpose(1, 2)).float().mul_(scale)
    scores.masked_fill_(torch.arange(first, end) > positions[..., None], float("-inf"))
    padding = -(end - first) % key_block
    scores = torch.nn.functional.pad(scores, (0, padding), value=float("-inf"))
    lse[..., past:] = scores.unflatten(-1, (-1, key_block)).logsumexp(-1)
