"""Block-sparse attention for Hopper in Gluon: warp-specialised, after FlashAttention-3 (Shah et al., 2024).

One warp fetches the listed key and value blocks by TMA into a ring of shared-memory stages; two warp groups of 64
packed rows each run wgmma on them. Each group issues the scores of the next block before the product with the values
of the last one, so that its softmax runs while the tensor cores are busy.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.block_lists import BlockLists
from kernels.block_sparse_attention import triton_kernel
from kernels.dispatch import Capability, capability
from kernels.hopper import aligned_for_tma, element, group_barrier, tma_load, unsupported_hopper

LOG2_E = 1.4426950408889634
_LOWEST = gl.constexpr(-1.0e30)  # a finite maximum keeps exp2(m - m) from being NaN in rows without a key
_ROWS = 128  # packed rows of a program: two warp groups of 64
_BARRIER_BYTES = 1024
_RING_BYTES = 128 * 1024  # keys and values in flight; more did not run faster


def unsupported(numbers: Capability) -> str | None:
    return unsupported_hopper(numbers)


@gluon.jit
def _tile(index, row_blocks, TILES: gl.constexpr, LIST_HEADS: gl.constexpr):
    """Tile index → (row block, list head, part of the row block). Neighbours share a list; the longest start first."""
    part = index % TILES
    list_head = index // TILES % LIST_HEADS
    return row_blocks - 1 - index // (TILES * LIST_HEADS), list_head, part


@gluon.jit
def _list_range(offsets_ptr, blocks_ptr, row_block, list_head, part, tokens, row_offset, LIST_HEADS: gl.constexpr,
                GROUP: gl.constexpr, ROW_BLOCK: gl.constexpr, KEY_BLOCK: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """(begin, end) of the tile's list, less the blocks that lie wholly in its future."""
    index = row_block.to(gl.int64) * LIST_HEADS + list_head
    begin, end = gl.load(offsets_ptr + index), gl.load(offsets_ptr + index + 1)
    last_token = row_block * ROW_BLOCK + (part * ROWS + ROWS - 1) // GROUP
    last_position = row_offset + gl.minimum(last_token, tokens - 1)
    future = end > begin
    while future:
        future = gl.load(blocks_ptr + end - 1) * KEY_BLOCK > last_position
        end = gl.where(future, end - 1, end)
        future = future & (end > begin)
    return begin, end


@gluon.jit
def _fetch(k_desc, v_desc, k_ring, v_ring, k_full, k_free, v_full, v_free, offsets_ptr, blocks_ptr, tokens, row_offset,
           row_blocks, num_tiles, LIST_HEADS: gl.constexpr, LISTS_PER_KV: gl.constexpr, GROUP: gl.constexpr,
           ROW_BLOCK: gl.constexpr, KEY_BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
           TILES: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The fetching warp: every tile's blocks, the last (the diagonal) first."""
    BLOCK_BYTES: gl.constexpr = KEY_BLOCK * HEAD_DIM * 2
    fetched = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_block, list_head, part = _tile(tile, row_blocks, TILES, LIST_HEADS)
        begin, end = _list_range(offsets_ptr, blocks_ptr, row_block, list_head, part, tokens, row_offset, LIST_HEADS,
                                 GROUP, ROW_BLOCK, KEY_BLOCK, ROWS)  # fmt: skip
        kv_head = list_head // LISTS_PER_KV
        count = (end - begin).to(gl.int32)
        block = gl.load(blocks_ptr + end - 1, mask=count > 0, other=0)
        for step in range(count):
            following = gl.load(blocks_ptr + end - 2 - step, mask=step + 1 < count, other=0)
            stage = fetched % STAGES
            phase = (fetched // STAGES & 1) ^ 1
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_full.index(stage), BLOCK_BYTES)
            tma_load(k_desc, [kv_head, block * KEY_BLOCK, 0], k_full.index(stage), k_ring.index(stage))
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_full.index(stage), BLOCK_BYTES)
            tma_load(v_desc, [kv_head, block * KEY_BLOCK, 0], v_full.index(stage), v_ring.index(stage))
            block = following
            fetched += 1


@gluon.jit
def _softmax(scores, m, qk_scale):
    """Online softmax: (weights, new maximum, rescaling factor); the maximum is in scaled base-2 units."""
    m_new = gl.maximum(m, gl.max(scores, 1) * qk_scale)
    weights = gl.exp2(scores * qk_scale - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return weights, m_new, alpha


@gluon.jit
def _thread_sums(weights, HALF: gl.constexpr, KEY_BLOCK: gl.constexpr):
    """Sums over the keys that one thread holds, [HALF, 8]: the rest of the sum waits for the end of the tile."""
    return gl.sum(gl.reshape(weights, [HALF, KEY_BLOCK // 8, 8]), 1)


@gluon.jit
def _attend(GROUP_INDEX: gl.constexpr, q_ptr, out_ptr, lse_ptr, q_tile, k_ring, v_ring, k_full, k_free, v_full, v_free,
            turns, offsets_ptr, blocks_ptr, stride_qt, stride_qh, stride_ot, stride_oh, tokens, row_offset, row_blocks,
            heads, num_tiles, qk_scale, LIST_HEADS: gl.constexpr, GROUP: gl.constexpr, ROW_BLOCK: gl.constexpr,
            KEY_BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
            STAGES: gl.constexpr, PING_PONG: gl.constexpr):  # fmt: skip
    """One warp group: 64 packed rows of every tile."""
    HALF: gl.constexpr = ROWS // 2
    dtype: gl.constexpr = k_ring.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HEAD_DIM // 8), HEAD_DIM // 8], [4, 1], [1, 0])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    used = 0  # blocks consumed so far, over all tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_block, list_head, part = _tile(tile, row_blocks, TILES, LIST_HEADS)
        begin, end = _list_range(offsets_ptr, blocks_ptr, row_block, list_head, part, tokens, row_offset, LIST_HEADS,
                                 GROUP, ROW_BLOCK, KEY_BLOCK, ROWS)  # fmt: skip
        count = (end - begin).to(gl.int32)
        start = part * ROWS + GROUP_INDEX * HALF

        packed = start + gl.arange(0, HALF, gl.SliceLayout(1, q_layout))
        token = row_block * ROW_BLOCK + packed // GROUP
        valid = (packed < ROW_BLOCK * GROUP) & (token < tokens)
        at = token.to(gl.int64) * stride_qt + (list_head * GROUP + packed % GROUP).to(gl.int64) * stride_qh
        channel = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, q_layout))
        q_tile.store(gl.load(q_ptr + at[:, None] + channel[None, :], mask=valid[:, None], other=0.0))
        fence_async_shared()
        group_barrier()

        # Blocks that reach past this half's first row need the mask: they are the list's last, so they come first.
        first_position = row_offset + row_block * ROW_BLOCK + start // GROUP
        masked = 0
        partial = count > 0
        while partial:
            partial = gl.load(blocks_ptr + end - 1 - masked) * KEY_BLOCK + KEY_BLOCK - 1 > first_position
            masked += partial.to(gl.int32)
            partial = partial & (masked < count)

        token = row_block * ROW_BLOCK + (start + gl.arange(0, HALF, s_rows)) // GROUP
        position = row_offset + token
        key = gl.arange(0, KEY_BLOCK, gl.SliceLayout(0, s_layout))
        acc = gl.zeros([HALF, HEAD_DIM], gl.float32, o_layout)
        m = gl.full([HALF], _LOWEST, gl.float32, s_rows)
        total = gl.zeros([HALF], gl.float32, s_rows)
        if count > 0:
            zeros = gl.zeros([HALF, KEY_BLOCK], gl.float32, s_layout)
            stage = used % STAGES
            mbarrier.wait(k_full.index(stage), used // STAGES & 1)
            if PING_PONG:
                mbarrier.wait(turns.index(GROUP_INDEX), (used & 1) ^ (1 - GROUP_INDEX))
            k = k_ring.index(stage).reshape([KEY_BLOCK, HEAD_DIM])
            scores = warpgroup_mma(q_tile, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_free.index(stage), count=1)
            if PING_PONG:
                mbarrier.arrive(turns.index(1 - GROUP_INDEX), count=1)
            keys = gl.load(blocks_ptr + end - 1) * KEY_BLOCK + key
            scores = gl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
            weights, m, alpha = _softmax(scores, m, qk_scale)
            sums = _thread_sums(weights, HALF, KEY_BLOCK)
            sum_rows: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
            p = gl.convert_layout(weights.to(dtype), p_layout)
            mbarrier.wait(k_full.index((used + 1) % STAGES), (used + 1) // STAGES & 1, pred=count > 1)
            for step in range(1, count):
                stage = (used + step) % STAGES
                before = (used + step - 1) % STAGES
                if PING_PONG:
                    mbarrier.wait(turns.index(GROUP_INDEX), (used + step & 1) ^ (1 - GROUP_INDEX))
                k = k_ring.index(stage).reshape([KEY_BLOCK, HEAD_DIM])
                scores = warpgroup_mma(q_tile, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(before), (used + step - 1) // STAGES & 1)
                v = v_ring.index(before).reshape([KEY_BLOCK, HEAD_DIM])
                acc = warpgroup_mma(p, v, acc, is_async=True)
                if PING_PONG:
                    mbarrier.arrive(turns.index(1 - GROUP_INDEX), count=1)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                mbarrier.arrive(k_free.index(stage), count=1)
                if step < masked:
                    keys = gl.load(blocks_ptr + end - 1 - step) * KEY_BLOCK + key
                    scores = gl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
                weights, m, alpha = _softmax(scores, m, qk_scale)
                decay = gl.convert_layout(alpha, sum_rows)
                sums = sums * decay[:, None] + _thread_sums(weights, HALF, KEY_BLOCK)
                # Waiting for the next keys here, not above, keeps the assembler from hoisting the wait for the
                # product over the softmax that it is to run beside: it moves nothing across this loop.
                ahead = used + step + 1
                mbarrier.wait(k_full.index(ahead % STAGES), ahead // STAGES & 1, pred=step + 1 < count)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_free.index(before), count=1)
                p = gl.convert_layout(weights.to(dtype), p_layout)
                acc = acc * gl.convert_layout(alpha, o_rows)[:, None]
            last = (used + count - 1) % STAGES
            mbarrier.wait(v_full.index(last), (used + count - 1) // STAGES & 1)
            v = v_ring.index(last).reshape([KEY_BLOCK, HEAD_DIM])
            acc = warpgroup_mma(p, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_free.index(last), count=1)
            used += count
            total = gl.convert_layout(gl.sum(sums, 1), s_rows)

        empty = total == 0.0
        lse = gl.where(empty, float("-inf"), (m + gl.log2(gl.where(empty, 1.0, total))) * 0.6931471805599453)
        head = list_head * GROUP + (start + gl.arange(0, HALF, s_rows)) % GROUP
        valid = (start + gl.arange(0, HALF, s_rows) < ROW_BLOCK * GROUP) & (token < tokens)
        gl.store(lse_ptr + token.to(gl.int64) * heads + head, lse, mask=valid)
        share = gl.convert_layout(1.0 / gl.where(empty, 1.0, total), o_rows)
        packed = start + gl.arange(0, HALF, o_rows)
        token = row_block * ROW_BLOCK + packed // GROUP
        valid = (packed < ROW_BLOCK * GROUP) & (token < tokens)
        at = token.to(gl.int64) * stride_ot + (list_head * GROUP + packed % GROUP).to(gl.int64) * stride_oh
        channel = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_layout))
        gl.store(out_ptr + at[:, None] + channel[None, :], (acc * share[:, None]).to(dtype), mask=valid[:, None])


# A count of 1 must not become a constant: constants can't be handed to the warp groups.
@gluon.jit(do_not_specialize=["tokens", "row_offset", "row_blocks", "heads", "num_tiles"])
def block_sparse_attention_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, offsets_ptr, blocks_ptr,
    stride_qt, stride_qh, stride_ot, stride_oh, tokens, row_offset, row_blocks, heads, num_tiles, qk_scale,
    LIST_HEADS: gl.constexpr, LISTS_PER_KV: gl.constexpr, GROUP: gl.constexpr, ROW_BLOCK: gl.constexpr,
    KEY_BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
    PING_PONG: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, KEY_BLOCK, HEAD_DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, KEY_BLOCK, HEAD_DIM], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS // 2, HEAD_DIM], q_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)  # both warp groups
        mbarrier.init(v_free.index(stage), count=2)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    # The tuples stand in the call: a variable would turn their constants into run-time values.
    gl.warp_specialize(
        [
            (_attend, (
                0, q_ptr, out_ptr, lse_ptr, q_tiles.index(0), k_ring, v_ring, k_full, k_free, v_full, v_free, turns,
                offsets_ptr, blocks_ptr, stride_qt, stride_qh, stride_ot, stride_oh, tokens, row_offset, row_blocks,
                heads, num_tiles, qk_scale, LIST_HEADS, GROUP, ROW_BLOCK, KEY_BLOCK, HEAD_DIM, ROWS, TILES, STAGES,
                PING_PONG,
            )),
            (_attend, (
                1, q_ptr, out_ptr, lse_ptr, q_tiles.index(1), k_ring, v_ring, k_full, k_free, v_full, v_free, turns,
                offsets_ptr, blocks_ptr, stride_qt, stride_qh, stride_ot, stride_oh, tokens, row_offset, row_blocks,
                heads, num_tiles, qk_scale, LIST_HEADS, GROUP, ROW_BLOCK, KEY_BLOCK, HEAD_DIM, ROWS, TILES, STAGES,
                PING_PONG,
            )),
            (_fetch, (
                k_desc, v_desc, k_ring, v_ring, k_full, k_free, v_full, v_free, offsets_ptr, blocks_ptr, tokens,
                row_offset, row_blocks, num_tiles, LIST_HEADS, LISTS_PER_KV, GROUP, ROW_BLOCK, KEY_BLOCK, HEAD_DIM,
                ROWS, TILES, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: BlockLists) -> bool:
    """Whether this kernel has a configuration for these arguments; the Triton kernel takes all others."""
    return q.shape[2] in (64, 128) and lists.key_block in (64, 128) and q.stride(1) % 8 == 0 and aligned_for_tma(k, v)


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: BlockLists,
    row_offset: int,
    scale: float,
    out: torch.Tensor,
    *,
    ping_pong: bool = False,
    stages: int | None = None,
    persistent: bool = True,
) -> torch.Tensor:
    """Writes `out`, returns lse. The keyword arguments are for benchmarks."""
    if not takes(q, k, v, lists):
        return triton_kernel.block_sparse_attention(q, k, v, lists, row_offset, scale, out)
    tokens, heads, head_dim = q.shape
    group = heads // lists.list_heads
    numbers = capability(q.device)
    if stages is None:
        ring_bytes = 2 * lists.key_block * head_dim * q.element_size()
        room = numbers.shared_memory_bytes - _BARRIER_BYTES - _ROWS * head_dim * q.element_size()
        stages = min(_RING_BYTES, room) // ring_bytes
    block = [1, lists.key_block, head_dim]
    layout = gl.NVMMASharedLayout.get_default_for(block, element(q.dtype))
    k_desc, v_desc = (TensorDescriptor(t, list(t.shape), list(t.stride()), block, layout) for t in (k, v))
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    tiles = triton.cdiv(lists.row_block * group, _ROWS)
    num_tiles = tiles * lists.list_heads * lists.row_blocks
    grid = min(num_tiles, numbers.multiprocessors) if persistent else num_tiles
    block_sparse_attention_kernel[(grid,)](
        q, k_desc, v_desc, out, lse, lists.offsets, lists.blocks,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), tokens, row_offset, lists.row_blocks, heads, num_tiles,
        scale * LOG2_E,
        LIST_HEADS=lists.list_heads, LISTS_PER_KV=lists.list_heads // k.shape[0], GROUP=group,
        ROW_BLOCK=lists.row_block, KEY_BLOCK=lists.key_block, HEAD_DIM=head_dim, ROWS=_ROWS, TILES=tiles,
        STAGES=stages, PING_PONG=ping_pong, num_warps=4,
    )  # fmt: skip
    return lse
