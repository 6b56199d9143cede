"""Block-wise log-sum-exp on the CPU: by plain matrix products over chunks that stay in the cache."""

import math
from functools import partial

import torch

from kernels.cpu_workers import run_all

_CHUNK_KEYS = 1024
_HEADROOM = 40.0


def block_lse(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, per_head: int, key_block: int, row_offset: int, scale: float
) -> torch.Tensor:
    """Base 2, [kv_heads, key_blocks, samples]."""
    if q.dtype == torch.float64:
        q, k = q.float(), k.float()
    kv_heads, samples = rows.shape
    group = q.shape[1] // kv_heads
    head = torch.arange(samples) // per_head % group + torch.arange(kv_heads)[:, None] * group
    lse = natural_block_lse(q[rows.long(), head], k, rows.long() + row_offset, key_block, scale)
    return lse.div_(math.log(2)).transpose(1, 2).contiguous()


def natural_block_lse(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, key_block: int, scale: float
) -> torch.Tensor:
    """Log-sum-exp of rows over each key block: [kv_heads, rows, key_blocks] float32, −inf for the future.

    q [kv_heads, rows, head_dim] at `positions` [kv_heads, rows]. Scores, exponentials and block sums are three passes
    over a chunk that stays in the cache, the sums a matrix product with an indicator of the blocks: several times as
    fast as the fused attention with one key block a batch entry. The exponentials are relative to the largest score
    among the keys next to the row and the first ones, and e^40 times as large as they need be: results below 1e-38 are
    denormal, which costs eight times the time. Where another score exceeds that largest by 48 they overflow, and
    everything is computed the exact way. In bfloat16 the shifted scores are rounded to steps of up to 1/4: one key's
    mass may be off by 12 %, without a bias to speak of, and shares of many keys and rows by less than 0.001.
    """
    kv_heads, k_tokens, _ = k.shape
    order = positions.argsort(1)
    sums = torch.zeros(kv_heads, q.shape[1], -(-k_tokens // key_block))
    base = torch.empty(kv_heads, q.shape[1])
    run_all(
        partial(_block_sums, q, k, positions, order, key_block, scale, sums, base, head) for head in range(kv_heads)
    )
    if not bool(sums.isfinite().all()):
        return _block_lse_exactly(q, k, positions, key_block, scale)
    return sums.log_().add_(base[..., None])


def _block_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    order: torch.Tensor,
    key_block: int,
    scale: float,
    sums: torch.Tensor,
    base: torch.Tensor,
    head: int,
) -> None:
    """One KV head: sums of exp(score − base) over each key block, rows in the order of their positions."""
    rows, keys = q[head, order[head]] * scale, k[head]
    at = positions[head, order[head]]
    chunk = max(1, _CHUNK_KEYS // key_block) * key_block
    indicator = torch.eye(chunk // key_block, dtype=q.dtype).repeat_interleave(key_block, 0)
    sorted_sums = torch.zeros_like(sums[head])
    starts = range(0, int(at[-1]) + 1, chunk)
    # Rows from bounds[i] on stand in chunk i or behind it.
    bounds = torch.searchsorted(at, torch.tensor([*starts, starts[-1] + chunk])).tolist()
    first_keys = keys[:key_block]
    largest = (rows @ first_keys.T).float()
    largest = largest.masked_fill_(torch.arange(len(first_keys)) > at[:, None], -torch.inf).amax(1)
    own = []
    for index, start in enumerate(starts):
        near = slice(bounds[index], bounds[index + 1])
        scores = (rows[near] @ keys[start : start + chunk].T).float()
        scores.masked_fill_(torch.arange(start, start + scores.shape[1]) > at[near, None], -torch.inf)
        if scores.numel():
            largest[near] = torch.maximum(largest[near], scores.amax(1))
        own.append(scores)
    offset = (_HEADROOM - largest).to(q.dtype)
    buffer = torch.empty(len(rows), chunk, dtype=q.dtype)
    for index, start in enumerate(starts):
        near, past = slice(bounds[index], bounds[index + 1]), slice(bounds[index + 1], None)
        first = start // key_block
        count = -(-own[index].shape[1] // key_block)
        member = indicator[: own[index].shape[1], :count]
        blocks = slice(first, first + count)
        sorted_sums[near, blocks] = own[index].add_(offset[near, None]).exp_() @ member.float()
        # One buffer for all chunks: a fresh one of this size costs its page faults every time.
        scores = buffer[: len(rows) - bounds[index + 1], : own[index].shape[1]]
        torch.addmm(offset[past, None], rows[past], keys[start : start + chunk].T, out=scores).exp_()
        sorted_sums[past, blocks] = (scores @ member).float()
    sums[head, order[head]] = sorted_sums
    base[head, order[head]] = offset.float().neg_()


def _block_lse_exactly(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, key_block: int, scale: float
) -> torch.Tensor:
    """The same in float32, some key blocks at a time."""
    kv_heads, k_tokens, _ = k.shape
    lse = torch.full((kv_heads, q.shape[1], -(-k_tokens // key_block)), float("-inf"))
    for start in range(0, k_tokens, _CHUNK_KEYS // key_block * key_block or key_block):
        keys = k[:, start : start + max(_CHUNK_KEYS // key_block, 1) * key_block]
        scores = torch.bmm(q.float(), keys.float().transpose(1, 2)).mul_(scale)
        scores.masked_fill_(torch.arange(start, start + keys.shape[1]) > positions[..., None], float("-inf"))
        scores = torch.nn.functional.pad(scores, (0, -keys.shape[1] % key_block), value=float("-inf"))
        part = scores.unflatten(-1, (-1, key_block)).logsumexp(-1)
        lse[..., start // key_block : start // key_block + part.shape[-1]] = part
    return lse
