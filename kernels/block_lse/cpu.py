"""Block-wise log-sum-exp on the CPU, by the fused attention over values that name the key's block.

Over a window of as many key blocks as a head has channels, let the value of a key be the unit vector of its block. The
attention's output is then each block's share of the window's softmax mass, and with the log-sum-exp that the
operation returns beside it, the block's own: scores, exponentials and sums in one pass that keeps nothing.
"""

import math

import torch

from kernels.dispatch import Capability
from kernels.flash_cpu import flash_batch, obstacle

# Key blocks of a window, at most: it should not be longer than a segment's rows, of which only the last needs a mask.
_WINDOW_BLOCKS = 64


def unsupported(numbers: Capability) -> str | None:
    return obstacle()


def block_lse(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, per_head: int, key_block: int, row_offset: int, scale: float
) -> torch.Tensor:
    """Base 2, [kv_heads, key_blocks, samples]."""
    lse = natural_block_lse(*_gathered(q, k, rows, per_head), rows.long() + row_offset, key_block, scale)
    return lse.div_(math.log(2)).transpose(1, 2).contiguous()


def block_masses(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, per_head: int, key_block: int, row_offset: int, scale: float
) -> torch.Tensor:
    """[kv_heads, samples, key_blocks]."""
    return masses_of_rows(*_gathered(q, k, rows, per_head), rows.long() + row_offset, key_block, scale)[0]


def _gathered(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, per_head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the sampled rows [kv_heads, samples, head_dim], k), in a dtype that the fused attention takes."""
    if q.dtype == torch.float64:
        q, k = q.float(), k.float()
    kv_heads, samples = rows.shape
    group = q.shape[1] // kv_heads
    head = torch.arange(samples) // per_head % group + torch.arange(kv_heads)[:, None] * group
    return q[rows.long(), head], k


def natural_block_lse(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, key_block: int, scale: float
) -> torch.Tensor:
    """Log-sum-exp of rows over each key block: [kv_heads, rows, key_blocks] float32, −inf for the future.

    Arguments as of `masses_of_rows`. Blocks whose share of their window's mass is below 1e-38 are −inf too.
    """
    masses, lse = masses_of_rows(q, k, positions, key_block, scale)
    return masses.log_().add_(lse[..., None])


def masses_of_rows(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, key_block: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax mass of rows over each key block [kv_heads, rows, key_blocks], and over all keys their log-sum-exp
    [kv_heads, rows]; both float32.

    q [kv_heads, rows, head_dim] at `positions` [kv_heads, rows]. A block's share of its window is rounded to the dtype
    of q.
    """
    kv_heads, k_tokens, head_dim = k.shape
    rows, key_blocks = q.shape[1], -(-k_tokens // key_block)
    window_blocks = min(head_dim, _WINDOW_BLOCKS)
    window = window_blocks * key_block
    block_of = torch.eye(window_blocks, head_dim, dtype=q.dtype).repeat_interleave(key_block, 0)
    parts: list[tuple[slice, torch.Tensor, torch.Tensor]] = []  # key blocks, shares of the window, its log-sum-exp

    # Windows that every row has behind it, all at once.
    past = min(int(positions.min()) + 1, k_tokens) // window
    if past:
        shares, lse = flash_batch(
            q.expand(past, -1, -1, -1),
            k[:, : past * window].unflatten(1, (past, window)).transpose(0, 1),
            block_of.expand(past, kv_heads, -1, -1),
            scale=scale,
        )
        for index in range(past):
            parts.append((slice(index * window_blocks, (index + 1) * window_blocks), shares[index], lse[index]))
    for start in range(past * window, k_tokens, window):
        keys = k[:, start : start + window]
        future = torch.arange(start, start + keys.shape[1]) > positions[..., None]
        mask = torch.zeros(future.shape, dtype=q.dtype).masked_fill_(future, -torch.inf)
        values = block_of[: keys.shape[1]].expand(kv_heads, -1, -1)
        shares, lse = flash_batch(q[None], keys[None], values[None], scale=scale, mask=mask[None])
        # Where a row has none of the window's keys, whatever the operation makes of that.
        unseen = start > positions
        shares, lse = shares[0].masked_fill(unseen[..., None], 0), lse[0].masked_fill(unseen, -torch.inf)
        first = start // key_block
        parts.append((slice(first, min(first + window_blocks, key_blocks)), shares, lse))

    total = torch.stack([lse for _, _, lse in parts]).logsumexp(0)
    masses = torch.empty(kv_heads, rows, key_blocks)
    for blocks, shares, lse in parts:
        weight = (lse - total).exp_()[..., None]
        torch.mul(shares[..., : blocks.stop - blocks.start], weight, out=masses[..., blocks])
    return masses, total
