"""Sampled log-sum-exps in Triton: one pass over the keys gives every block's, a second adds up the kept ones."""

import torch
import triton
import triton.language as tl

from kernels.block_lists import BlockLists
from kernels.block_lse import block_lse, rows_per_pass

LN_2 = 0.6931471805599453


@triton.jit
def kept_lse_kernel(
    lse_ptr, rows_ptr, offsets_ptr, blocks_ptr, all_ptr, kept_ptr, samples, key_blocks,
    GROUP: tl.constexpr, LIST_HEADS: tl.constexpr, HEADS_PER_LIST: tl.constexpr, ROW_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One sample of one KV head's group, base 2 in and out; samples lie [sample, group]."""
    sample = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    base = lse_ptr + kv_head * key_blocks * samples + sample
    row = tl.load(rows_ptr + kv_head * samples + sample)
    list_head = (kv_head * GROUP + sample % GROUP) // HEADS_PER_LIST
    index = (row // ROW_BLOCK).to(tl.int64) * LIST_HEADS + list_head
    begin, end = tl.load(offsets_ptr + index), tl.load(offsets_ptr + index + 1)
    m, total = tl.zeros([], tl.float32) - 1.0e30, tl.zeros([], tl.float32)
    for start in tl.range(0, key_blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        lse = tl.load(base + block.to(tl.int64) * samples, mask=block < key_blocks, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(lse, 0))
        total = total * tl.exp2(m - m_new) + tl.sum(tl.exp2(lse - m_new), 0)
        m = m_new
    tl.store(all_ptr + kv_head * samples + sample, m + tl.log2(total))
    # A kept sum never passes the whole one's maximum: m serves both.
    kept = tl.zeros([], tl.float32)
    for start in tl.range(0, (end - begin).to(tl.int32), CHUNK):
        at = start + tl.arange(0, CHUNK)
        block = tl.load(blocks_ptr + begin + at, mask=at < end - begin, other=0)
        lse = tl.load(base + block.to(tl.int64) * samples, mask=at < end - begin, other=float("-inf"))
        kept += tl.sum(tl.exp2(lse - m), 0)
    tl.store(
        kept_ptr + kv_head * samples + sample,
        tl.where(kept == 0.0, float("-inf"), m + tl.log2(tl.where(kept == 0.0, 1.0, kept))),
    )


def sampled_lse(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, lists: BlockLists, row_offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(lse_all, lse_kept), each [heads, samples] float32."""
    heads, kv_heads = q.shape[1], k.shape[0]
    group, samples = heads // kv_heads, rows.shape[1]
    key_blocks = triton.cdiv(k.shape[1], lists.key_block)
    # [kv_heads, samples × group]: samples of all heads of a group lie side by side, in the caller's order.
    packed = rows.view(kv_heads, group, samples).transpose(1, 2).reshape(kv_heads, samples * group)
    results = torch.empty(2, kv_heads, samples * group, dtype=torch.float32, device=q.device)
    step = max(1, rows_per_pass(kv_heads, key_blocks) // group) * group
    for first in range(0, samples * group, step):
        part = packed[:, first : first + step].contiguous()
        lse = block_lse(q, k, part, per_head=1, key_block=lists.key_block, row_offset=row_offset, scale=scale)
        both = torch.empty(2, *part.shape, dtype=torch.float32, device=q.device)
        kept_lse_kernel[(part.shape[1], kv_heads)](
            lse, part, lists.offsets, lists.blocks, both[0], both[1], part.shape[1], lse.shape[1],
            GROUP=group, LIST_HEADS=lists.list_heads, HEADS_PER_LIST=heads // lists.list_heads,
            ROW_BLOCK=lists.row_block, CHUNK=min(1024, max(16, triton.next_power_of_2(key_blocks))),
        )  # fmt: skip
        results[:, :, first : first + step] = both
    lse_all, lse_kept = (results * LN_2).view(2, kv_heads, samples, group).transpose(2, 3).reshape(2, heads, samples)
    return lse_all, lse_kept
