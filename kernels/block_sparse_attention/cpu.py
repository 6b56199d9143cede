"""Block-sparse attention on the CPU: kept past blocks gathered, unmasked fused attention over them, the exact causal
diagonal apart, both merged by their log-sum-exps. Work outside the lists is never done."""

from functools import partial

import torch

from kernels.block_lists import BlockLists
from kernels.cpu_workers import run_all
from kernels.dense_attention.cpu import diagonal
from kernels.dispatch import Capability
from kernels.flash_cpu import flash, merge, obstacle, pack, unpack


def unsupported(numbers: Capability) -> str | None:
    return obstacle()


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: BlockLists,
    row_offset: int,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Writes `out`, returns lse."""
    wide = q.dtype == torch.float64
    queries, keys, values = (t.float() if wide else t for t in (q, k, v))
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    offsets, blocks = lists.offsets.tolist(), lists.blocks.long()

    def one(index: int) -> None:
        start = index * lists.row_block
        rows = slice(start, min(start + lists.row_block, q.shape[0]))
        first = index * lists.list_heads
        chosen = [blocks[offsets[i] : offsets[i + 1]] for i in range(first, first + lists.list_heads)]
        result, lse[rows] = _row_block(queries[rows], keys, values, chosen, lists.key_block, row_offset + start, scale)
        out[rows] = result.to(out.dtype)

    run_all(partial(one, index) for index in range(lists.row_blocks))
    return lse


def _row_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chosen: list[torch.Tensor],
    key_block: int,
    start: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row block at position `start`; `chosen` holds one ascending block list for each list head."""
    rows, heads, head_dim = q.shape
    kv_heads, group = len(chosen), heads // len(chosen)
    step = kv_heads // k.shape[0]
    whole = start // key_block  # blocks that lie in the past as a whole
    near_blocks = range(whole, -(-(start + rows) // key_block))
    packed = pack(q, kv_heads)
    far = torch.zeros(kv_heads, rows * group, head_dim, dtype=q.dtype)
    far_lse = torch.full((kv_heads, rows * group), float("-inf"))
    exact = start % key_block == 0
    for head, blocks in enumerate(chosen):
        past = int(torch.searchsorted(blocks, whole))
        near = blocks[past:]
        exact = exact and len(near) == len(near_blocks) and int(near[-1]) == near_blocks[-1]
        if past:
            keys, values = (_gather(t[head // step], blocks[:past], key_block) for t in (k, v))
            result, result_lse = flash(packed[head : head + 1], keys[None], values[None], scale=scale)
            far[head], far_lse[head] = result[0], result_lse[0]
    end = start + rows
    if exact:
        own, own_lse = diagonal(q, k[:, start:end], v[:, start:end], scale)
    else:
        own, own_lse = _masked(q, k, v, chosen, whole, key_block, start, scale)
    return merge(own, own_lse, *unpack(far, far_lse, group))


def _gather(x: torch.Tensor, blocks: torch.Tensor, key_block: int) -> torch.Tensor:
    """Rows of `blocks` of x [tokens, head_dim]; runs of whole blocks only."""
    whole = x.shape[0] // key_block * key_block
    return x[:whole].view(-1, key_block, x.shape[1]).index_select(0, blocks).flatten(0, 1)


def _masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chosen: list[torch.Tensor],
    whole: int,
    key_block: int,
    start: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks from `whole` on with an explicit mask: lists that leave out a part of the diagonal, odd offsets."""
    rows, heads, _ = q.shape
    first, end = whole * key_block, start + rows
    positions = torch.arange(first, end)
    future = positions > torch.arange(start, end)[:, None]
    kept = torch.stack([torch.isin(positions // key_block, blocks) for blocks in chosen])
    mask = kept.repeat_interleave(heads // len(chosen), 0)[:, None] & ~future
    group = heads // k.shape[0]
    keys, values = (t[:, first:end].repeat_interleave(group, 0).float() for t in (k, v))
    scores = (q.transpose(0, 1).float() @ keys.transpose(1, 2) * scale).masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return (weights @ values).transpose(0, 1), lse.T
