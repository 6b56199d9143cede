"""Block-wise log-sum-exp for Hopper in Gluon: one warp fetches key blocks by TMA, two warp groups multiply and reduce.

Each group of 64 samples has two blocks' products in flight and reduces the first while the second runs.
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

from kernels.block_lse import triton_kernel
from kernels.dispatch import Capability
from kernels.hopper import aligned_for_tma, element, group_barrier, tma_load, unsupported_hopper

LOG2_E = 1.4426950408889634
_ROWS = 128  # samples of a program: two warp groups of 64
_STAGES = 4
_CHUNK = 64  # key blocks of a program


def unsupported(numbers: Capability) -> str | None:
    return unsupported_hopper(numbers)


@gluon.jit
def _fetch(k_desc, ring, full, free, first, last, kv_head, KEY_BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr,
           STAGES: gl.constexpr):  # fmt: skip
    BLOCK_BYTES: gl.constexpr = KEY_BLOCK * HEAD_DIM * 2
    for step in range(last - first):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), BLOCK_BYTES)
        tma_load(k_desc, [kv_head, (first + step) * KEY_BLOCK, 0], full.index(stage), ring.index(stage))


@gluon.jit
def _reduce(scores, block, full_blocks, position, key, out_at, stride_ob, valid, qk_scale, KEY_BLOCK: gl.constexpr):
    """Store one block's log-sum-exps; only blocks that some sample does not see wholly need the mask."""
    if block >= full_blocks:
        scores = gl.where((block * KEY_BLOCK + key)[None, :] <= position[:, None], scores, float("-inf"))
    # A finite floor keeps exp2 from -inf - -inf; scores of real keys never come near it.
    m = gl.maximum(gl.max(scores, 1) * qk_scale, -1.0e30)
    total = gl.sum(gl.exp2(scores * qk_scale - m[:, None]), 1)
    value = gl.where(total == 0.0, float("-inf"), m + gl.log2(gl.where(total == 0.0, 1.0, total)))
    gl.store(out_at + block * stride_ob, value, mask=valid)


@gluon.jit
def _multiply(HALF_INDEX: gl.constexpr, q_ptr, rows_ptr, out_ptr, q_tile, ring, full, free, first, last, full_blocks,
              end, kv_head, start, stride_qt, stride_qh, samples, key_blocks, row_offset, qk_scale,
              GROUP: gl.constexpr, PER_HEAD: gl.constexpr, KEY_BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr,
              ROWS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """One warp group: 64 samples against blocks first … last - 1; blocks last … end - 1 are in everyone's future."""
    HALF: gl.constexpr = ROWS // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_BLOCK, 16])
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HEAD_DIM // 8), HEAD_DIM // 8], [4, 1], [1, 0])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    start += HALF_INDEX * HALF
    sample = start + gl.arange(0, HALF, gl.SliceLayout(1, q_layout))
    row = gl.load(rows_ptr + kv_head * samples + sample, mask=sample < samples, other=0)
    head = kv_head * GROUP + sample // PER_HEAD % GROUP
    at = row.to(gl.int64) * stride_qt + head * stride_qh
    channel = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, q_layout))
    q_tile.store(gl.load(q_ptr + at[:, None] + channel[None, :], mask=(sample < samples)[:, None], other=0.0))
    fence_async_shared()
    group_barrier()

    sample = start + gl.arange(0, HALF, s_rows)
    valid = sample < samples
    position = gl.load(rows_ptr + kv_head * samples + sample, mask=valid, other=0) + row_offset
    key = gl.arange(0, KEY_BLOCK, gl.SliceLayout(0, s_layout))
    stride_ob = samples.to(gl.int64)
    out_at = out_ptr + kv_head * key_blocks * stride_ob + sample
    zeros = gl.zeros([HALF, KEY_BLOCK], gl.float32, s_layout)
    count = last - first
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    for pair in range(count // 2):
        step = 2 * pair
        one, two = step % STAGES, (step + 1) % STAGES
        k = ring.index(one).reshape([KEY_BLOCK, HEAD_DIM])
        first_scores = warpgroup_mma(q_tile, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(full.index(two), (step + 1) // STAGES & 1)
        k = ring.index(two).reshape([KEY_BLOCK, HEAD_DIM])
        second_scores = warpgroup_mma(q_tile, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(first_scores,))
        mbarrier.arrive(free.index(one), count=1)
        _reduce(scores, first + step, full_blocks, position, key, out_at, stride_ob, valid, qk_scale, KEY_BLOCK)
        # Waiting for the next keys here, not above, keeps the assembler from hoisting the wait for the second product
        # over the reduction that it is to run beside: it moves nothing across this loop.
        mbarrier.wait(full.index((step + 2) % STAGES), (step + 2) // STAGES & 1, pred=step + 2 < count)
        scores = warpgroup_mma_wait(0, deps=(second_scores,))
        mbarrier.arrive(free.index(two), count=1)
        _reduce(scores, first + step + 1, full_blocks, position, key, out_at, stride_ob, valid, qk_scale, KEY_BLOCK)
    if count % 2 == 1:
        stage = (count - 1) % STAGES
        k = ring.index(stage).reshape([KEY_BLOCK, HEAD_DIM])
        scores = warpgroup_mma(q_tile, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(free.index(stage), count=1)
        _reduce(scores, last - 1, full_blocks, position, key, out_at, stride_ob, valid, qk_scale, KEY_BLOCK)
    nothing = gl.full([HALF], float("-inf"), gl.float32, s_rows)
    for block in range(last, end):
        gl.store(out_at + block * stride_ob, nothing, mask=valid)


# A count of 1 must not become a constant: constants can't be handed to the warp groups.
@gluon.jit(do_not_specialize=["samples", "key_blocks", "row_offset"])
def block_lse_kernel(
    q_ptr, k_desc, rows_ptr, out_ptr, stride_qt, stride_qh, samples, key_blocks, row_offset, qk_scale,
    GROUP: gl.constexpr, PER_HEAD: gl.constexpr, KEY_BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, CHUNK: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    kv_head = gl.program_id(1)
    start = gl.program_id(0) * ROWS
    # The samples' least and greatest positions bound what needs a mask and what is wholly in the future.
    sample = start + gl.arange(0, ROWS, flat)
    row = gl.load(rows_ptr + kv_head.to(gl.int64) * samples + sample, mask=sample < samples, other=0)
    greatest = gl.max(gl.where(sample < samples, row, 0), 0) + row_offset
    least = gl.min(gl.where(sample < samples, row, 0x7FFFFFFF - row_offset), 0) + row_offset
    first = gl.program_id(2) * CHUNK
    end = gl.minimum(first + CHUNK, key_blocks)
    last = gl.minimum(gl.maximum(greatest // KEY_BLOCK + 1, first), end)
    full_blocks = (least + 1) // KEY_BLOCK
    ring = gl.allocate_shared_memory(dtype, [STAGES, 1, KEY_BLOCK, HEAD_DIM], k_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS // 2, HEAD_DIM], gl.NVMMASharedLayout(128, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)  # both warp groups
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                0, q_ptr, rows_ptr, out_ptr, q_tiles.index(0), ring, full, free, first, last, full_blocks, end,
                kv_head.to(gl.int64), start, stride_qt, stride_qh, samples, key_blocks, row_offset, qk_scale, GROUP,
                PER_HEAD, KEY_BLOCK, HEAD_DIM, ROWS, STAGES,
            )),
            (_multiply, (
                1, q_ptr, rows_ptr, out_ptr, q_tiles.index(1), ring, full, free, first, last, full_blocks, end,
                kv_head.to(gl.int64), start, stride_qt, stride_qh, samples, key_blocks, row_offset, qk_scale, GROUP,
                PER_HEAD, KEY_BLOCK, HEAD_DIM, ROWS, STAGES,
            )),
            (_fetch, (k_desc, ring, full, free, first, last, kv_head, KEY_BLOCK, HEAD_DIM, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def block_lse(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, per_head: int, key_block: int, row_offset: int, scale: float
) -> torch.Tensor:
    kv_heads, k_tokens, head_dim = k.shape
    taken = head_dim in (64, 128) and key_block in (64, 128) and q.stride(1) % 8 == 0 and aligned_for_tma(k)
    if not taken:
        return triton_kernel.block_lse(q, k, rows, per_head, key_block, row_offset, scale)
    samples, key_blocks = rows.shape[1], triton.cdiv(k_tokens, key_block)
    out = torch.empty(kv_heads, key_blocks, samples, dtype=torch.float32, device=q.device)
    block = [1, key_block, head_dim]
    layout = gl.NVMMASharedLayout.get_default_for(block, element(q.dtype))
    descriptor = TensorDescriptor(k, list(k.shape), list(k.stride()), block, layout)
    block_lse_kernel[(triton.cdiv(samples, _ROWS), kv_heads, triton.cdiv(key_blocks, _CHUNK))](
        q, descriptor, rows, out, q.stride(0), q.stride(1), samples, key_blocks, row_offset, scale * LOG2_E,
        GROUP=q.shape[1] // kv_heads, PER_HEAD=per_head, KEY_BLOCK=key_block, HEAD_DIM=head_dim, ROWS=_ROWS,
        STAGES=_STAGES, CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
    return out
