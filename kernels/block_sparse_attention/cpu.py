"""Block-sparse attention on the CPU: kept past blocks gathered, unmasked fused attention over them, the exact causal
diagonal apart, both merged by their log-sum-exps. Work outside the lists is never done."""

from functools import partial
from itertools import pairwise

import torch

from kernels.block_lists import BlockLists
from kernels.cpu_workers import run_all
from kernels.dispatch import Capability
from kernels.flash_cpu import flash, flash_batch, merge, obstacle


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
    if q.dtype == torch.float64:
        q, k, v = q.float(), k.float(), v.float()
    starts = torch.arange(lists.row_blocks) * lists.row_block + row_offset
    ends = (starts + lists.row_block).clamp(max=row_offset + q.shape[0])
    whole = starts // lists.key_block  # blocks that lie in a row block's past as a whole
    counts = lists.offsets.diff().long()
    of_list = torch.repeat_interleave(torch.arange(len(counts)), counts)
    chosen = lists.blocks[: len(of_list)].long()
    in_past = chosen < whole[of_list // lists.list_heads]
    past_counts = torch.bincount(of_list[in_past], minlength=len(counts))

    far, far_lse = _past(q, k, v, lists, chosen, past_counts, scale)
    near_blocks = -(-ends // lists.key_block) - whole
    complete = (counts - past_counts).view(-1, lists.list_heads) == near_blocks[:, None]
    if bool(complete.all()) and not bool((starts % lists.key_block).any()):
        near, near_lse = _diagonals(q, k, v, lists.row_block, row_offset, scale)
    else:
        near, near_lse = _masked_diagonals(q, k, v, lists, chosen, row_offset, scale)
    result, lse = merge(near, near_lse, far, far_lse)
    out.copy_(result)
    return lse


def _past(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: BlockLists,
    chosen: torch.Tensor,
    past_counts: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the blocks that lie in the past as a whole, each (row block, list head) a piece for one thread."""
    tokens, heads, head_dim = q.shape
    group, per_kv_head = heads // lists.list_heads, lists.list_heads // k.shape[0]
    far = torch.zeros(q.shape, dtype=q.dtype)
    far_lse = torch.full((tokens, heads), -torch.inf)
    usable = k.shape[1] // lists.key_block * lists.key_block
    keys, values = (t[:, :usable].unflatten(1, (-1, lists.key_block)) for t in (k, v))
    firsts, sizes = lists.offsets.tolist(), past_counts.tolist()

    def one(index: int) -> None:
        block, head = divmod(index, lists.list_heads)
        rows = slice(block * lists.row_block, min((block + 1) * lists.row_block, tokens))
        own = slice(head * group, (head + 1) * group)
        kept = chosen[firsts[index] : firsts[index] + sizes[index]]
        gathered = (t[head // per_kv_head].index_select(0, kept).flatten(0, 1)[None] for t in (keys, values))
        # A group's rows share a pass over the keys.
        packed = q[rows, own].reshape(1, -1, head_dim)
        result, lse = flash(packed, *gathered, scale=scale)
        far[rows, own], far_lse[rows, own] = result.view(-1, group, head_dim), lse.view(-1, group)

    # The longest first, so that no thread is left with a long one at the end.
    longest = sorted((i for i in range(len(sizes)) if sizes[i]), key=lambda i: -sizes[i])
    run_all(partial(one, index) for index in longest)
    return far, far_lse


def _diagonals(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_block: int, row_offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each row block to its own keys, all whole blocks of a KV head at once."""
    tokens, heads, head_dim = q.shape
    group = heads // k.shape[0]
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(tokens, heads)
    blocks = tokens // row_block
    parts = [(0, blocks, row_block)] if blocks else []
    if tokens % row_block:
        parts.append((blocks * row_block, 1, tokens % row_block))
    for first, count, size in parts:
        rows = slice(first, first + count * size)
        for head in range(k.shape[0]):
            own = slice(head * group, (head + 1) * group)
            queries = q[rows, own].unflatten(0, (count, size)).transpose(1, 2)
            keys, values = (
                t[head, row_offset + rows.start : row_offset + rows.stop]
                .view(count, 1, size, head_dim)
                .expand(-1, group, -1, -1)
                for t in (k, v)
            )
            result, result_lse = flash_batch(queries, keys, values, scale=scale, causal=True)
            out[rows, own] = result.transpose(1, 2).flatten(0, 1)
            lse[rows, own] = result_lse.transpose(1, 2).flatten(0, 1)
    return out, lse


def _masked_diagonals(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: BlockLists,
    chosen: torch.Tensor,
    row_offset: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with an explicit mask: lists that leave out a part of the diagonal, odd offsets."""
    out, lse = torch.empty(q.shape, dtype=torch.float32), torch.empty(q.shape[:2])
    offsets = lists.offsets.tolist()
    group = q.shape[1] // k.shape[0]
    for block in range(lists.row_blocks):
        rows = slice(block * lists.row_block, min((block + 1) * lists.row_block, q.shape[0]))
        start, end = rows.start + row_offset, rows.stop + row_offset
        first = start // lists.key_block * lists.key_block
        positions = torch.arange(first, end)
        future = positions > torch.arange(start, end)[:, None]
        bounds = offsets[block * lists.list_heads : (block + 1) * lists.list_heads + 1]
        kept = torch.stack([torch.isin(positions // lists.key_block, chosen[a:b]) for a, b in pairwise(bounds)])
        mask = kept.repeat_interleave(q.shape[1] // lists.list_heads, 0)[:, None] & ~future
        keys, values = (t[:, first:end].repeat_interleave(group, 0).float() for t in (k, v))
        scores = (q[rows].transpose(0, 1).float() @ keys.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
        block_lse = scores.logsumexp(-1)
        weights = (scores - block_lse.nan_to_num(neginf=0.0)[..., None]).exp()
        out[rows], lse[rows] = (weights @ values).transpose(0, 1), block_lse.T
    return out, lse
