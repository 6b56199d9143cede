"""Block-sparse attention in Triton: FlashAttention-2's online softmax (Dao, 2023) over listed key blocks.

One program computes a tile of packed rows: the query heads that share a list lie side by side, row r of a row block's
tile being token r // GROUP and head r % GROUP, so that each key block is read once for all of them.
"""

import torch
import triton
import triton.language as tl

from kernels.block_lists import BlockLists
from kernels.dispatch import Capability
from kernels.launch import Tile, block_sparse_tile, precision

# A running maximum that is finite keeps exp2(m - m) from being NaN in rows that have met no key yet.
_LOWEST = tl.constexpr(-1.0e30)
LOG2_E = 1.4426950408889634


def unsupported(numbers: Capability) -> str | None:
    if numbers.device_type == "cuda" and numbers.compute < (8, 0):
        return f"compute capability {numbers.compute}, needs (8, 0)"
    return None


@triton.jit
def _accumulate(q, k_base, v_base, acc, m, total, key_start, k_tokens, position, stride_kt, stride_vt, qk_scale,
                HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """One step of the online softmax: BLOCK_N keys from key_start on."""
    keys = key_start + tl.arange(0, BLOCK_N)
    channels = tl.arange(0, BLOCK_D)
    rows = keys.to(tl.int64)[:, None]
    k_at, v_at = k_base + rows * stride_kt + channels[None, :], v_base + rows * stride_vt + channels[None, :]
    # Blocks before the tile's first row lie inside k: they load without a mask, unless channels are padded.
    inside = (keys[:, None] < k_tokens) & (channels[None, :] < HEAD_DIM)
    PADDED: tl.constexpr = MASKED or BLOCK_D != HEAD_DIM
    k = tl.load(k_at, mask=inside, other=0.0) if PADDED else tl.load(k_at)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
    if MASKED:
        scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    weights = tl.exp2(scores - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    v = tl.load(v_at, mask=inside, other=0.0) if PADDED else tl.load(v_at)
    acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, total * alpha + tl.sum(weights, 1)


@triton.jit
def block_sparse_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, offsets_ptr, blocks_ptr,
    stride_qt, stride_qh, stride_kh, stride_kt, stride_vh, stride_vt, stride_ot, stride_oh,
    tokens, k_tokens, row_offset, row_blocks, heads, qk_scale,
    LIST_HEADS: tl.constexpr, LISTS_PER_KV: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Neighbours share a list, so its key blocks are in L2; the last rows, which see the most keys, start first.
    program = tl.program_id(0)
    list_head = program // TILES % LIST_HEADS
    row_block = row_blocks - 1 - program // (TILES * LIST_HEADS)
    packed = program % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row_block * ROW_BLOCK + packed // GROUP
    head = list_head * GROUP + packed % GROUP
    valid = (packed < ROW_BLOCK * GROUP) & (token < tokens)
    channels = tl.arange(0, BLOCK_D)
    filled = valid[:, None] & (channels[None, :] < HEAD_DIM)
    q_rows = token.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    q = tl.load(q_ptr + q_rows[:, None] + channels[None, :], mask=filled, other=0.0)
    kv_head = (list_head // LISTS_PER_KV).to(tl.int64)
    k_base, v_base = k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_vh

    first_token = row_block * ROW_BLOCK + program % TILES * BLOCK_M // GROUP
    last_token = row_block * ROW_BLOCK + (program % TILES * BLOCK_M + BLOCK_M - 1) // GROUP
    # A tile can lie wholly behind the last row: its full blocks must still lie inside k.
    first_position = row_offset + tl.minimum(first_token, tokens - 1)
    last_position = row_offset + tl.minimum(last_token, tokens - 1)
    list_index = row_block.to(tl.int64) * LIST_HEADS + list_head
    begin, end = tl.load(offsets_ptr + list_index), tl.load(offsets_ptr + list_index + 1)
    # Lists ascend: step back over blocks that lie wholly in this tile's future, then over those that need the mask.
    future = end > begin
    while future:
        future = tl.load(blocks_ptr + end - 1) * KEY_BLOCK > last_position
        end = tl.where(future, end - 1, end)
        future = future & (end > begin)
    full = end
    partial = full > begin
    while partial:
        partial = tl.load(blocks_ptr + full - 1) * KEY_BLOCK + KEY_BLOCK - 1 > first_position
        full = tl.where(partial, full - 1, full)
        partial = partial & (full > begin)

    position = row_offset + token
    STEPS: tl.constexpr = KEY_BLOCK // BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    list_ptr = blocks_ptr + begin
    for step in tl.range(0, (full - begin).to(tl.int32) * STEPS):
        key_start = tl.load(list_ptr + step // STEPS) * KEY_BLOCK + step % STEPS * BLOCK_N
        acc, m, total = _accumulate(q, k_base, v_base, acc, m, total, key_start, k_tokens, position, stride_kt,
                                    stride_vt, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_N, False, PRECISION)  # fmt: skip
    for step in tl.range((full - begin).to(tl.int32) * STEPS, (end - begin).to(tl.int32) * STEPS):
        key_start = tl.load(list_ptr + step // STEPS) * KEY_BLOCK + step % STEPS * BLOCK_N
        acc, m, total = _accumulate(q, k_base, v_base, acc, m, total, key_start, k_tokens, position, stride_kt,
                                    stride_vt, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_N, True, PRECISION)  # fmt: skip

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    lse = tl.where(empty, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)
    out_rows = token.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
    tl.store(out_ptr + out_rows[:, None] + channels[None, :], acc.to(out_ptr.dtype.element_ty), mask=filled)
    tl.store(lse_ptr + token.to(tl.int64) * heads + head, lse, mask=valid)


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: BlockLists,
    row_offset: int,
    scale: float,
    out: torch.Tensor,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Writes `out`, returns lse. `tile` overrides the configuration that the device's shared memory asks for."""
    tokens, heads, head_dim = q.shape
    group = heads // lists.list_heads
    tile = tile or block_sparse_tile(q, lists.row_block * group, lists.key_block)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    tiles = triton.cdiv(lists.row_block * group, tile.rows)
    block_sparse_attention_kernel[(tiles * lists.list_heads * lists.row_blocks,)](
        q, k, v, out, lse, lists.offsets, lists.blocks,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        tokens, k.shape[1], row_offset, lists.row_blocks, heads, scale * LOG2_E,
        LIST_HEADS=lists.list_heads, LISTS_PER_KV=lists.list_heads // k.shape[0], GROUP=group,
        ROW_BLOCK=lists.row_block, KEY_BLOCK=lists.key_block, HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_M=tile.rows, BLOCK_N=tile.keys, TILES=tiles,
        PRECISION=precision(q.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return lse
