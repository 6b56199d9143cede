"""Block-wise log-sum-exp in Triton: one program a tile of samples and a run of key blocks."""

import torch
import triton
import triton.language as tl

from kernels.launch import precision, scoring_tile, shared_memory_bytes

LOG2_E = 1.4426950408889634


@triton.jit
def block_lse_kernel(
    q_ptr, k_ptr, rows_ptr, out_ptr,
    stride_qt, stride_qh, stride_kh, stride_kt,
    samples, k_tokens, key_blocks, row_offset, qk_scale,
    GROUP: tl.constexpr, PER_HEAD: tl.constexpr, KEY_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out[kv_head, key block, sample] = log2 Σ 2^(score of the block's causal keys), -inf where there is none."""
    kv_head = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = sample < samples
    row = tl.load(rows_ptr + kv_head * samples + sample, mask=valid, other=0)
    position = tl.where(valid, row + row_offset, -1)
    head = kv_head * GROUP + sample // PER_HEAD % GROUP
    channels = tl.arange(0, BLOCK_D)
    q_rows = row.to(tl.int64) * stride_qt + head * stride_qh
    q = tl.load(
        q_ptr + q_rows[:, None] + channels[None, :], mask=valid[:, None] & (channels[None, :] < HEAD_DIM), other=0.0
    )
    out_base = out_ptr + kv_head * key_blocks * samples + sample
    first = tl.program_id(2) * CHUNK
    last = tl.minimum(first + CHUNK, key_blocks)
    # Blocks past every row's position only need their -inf.
    seen = tl.minimum(tl.maximum(tl.max(position, 0) // KEY_BLOCK + 1, first), last)
    STEPS: tl.constexpr = KEY_BLOCK // BLOCK_N
    stride_ob = tl.zeros([], tl.int64) + samples
    k_base = k_ptr + kv_head * stride_kh
    for block in tl.range(first, seen):
        m = tl.full([BLOCK_M], -1.0e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for step in tl.static_range(STEPS):
            keys = block * KEY_BLOCK + step * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = (keys[:, None] < k_tokens) & (channels[None, :] < HEAD_DIM)
            k = tl.load(k_base + keys.to(tl.int64)[:, None] * stride_kt + channels[None, :], mask=inside, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
            scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
            m_new = tl.maximum(m, tl.max(scores, 1))
            total = total * tl.exp2(m - m_new) + tl.sum(tl.exp2(scores - m_new[:, None]), 1)
            m = m_new
        value = tl.where(total == 0.0, float("-inf"), m + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(out_base + block * stride_ob, value, mask=valid)
    for block in tl.range(seen, last):
        tl.store(out_base + block * stride_ob, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=valid)


def block_lse(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, per_head: int, key_block: int, row_offset: int, scale: float
) -> torch.Tensor:
    kv_heads, k_tokens, head_dim = k.shape
    samples, key_blocks = rows.shape[1], triton.cdiv(k_tokens, key_block)
    out = torch.empty(kv_heads, key_blocks, samples, dtype=torch.float32, device=q.device)
    tile = scoring_tile(head_dim, q.element_size(), samples, key_block, shared_memory_bytes(q.device))
    chunk = min(64, triton.next_power_of_2(key_blocks))
    block_lse_kernel[(triton.cdiv(samples, tile.rows), kv_heads, triton.cdiv(key_blocks, chunk))](
        q, k, rows, out, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        samples, k_tokens, key_blocks, row_offset, scale * LOG2_E,
        GROUP=q.shape[1] // kv_heads, PER_HEAD=per_head, KEY_BLOCK=key_block, HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_M=tile.rows, BLOCK_N=tile.keys, CHUNK=chunk,
        PRECISION=precision(q.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
