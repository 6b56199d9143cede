"""Block scores in Triton: block-wise log-sum-exps of the sampled rows, then their softmax, averaged by fold."""

import torch
import triton
import triton.language as tl

from kernels.block_lse import block_lse, rows_per_pass


@triton.jit
def fold_masses_kernel(
    lse_ptr, out_ptr, samples, key_blocks, out_blocks,
    KV_HEADS: tl.constexpr, PER_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One (row block, KV head): lse [kv_heads, key_blocks, samples], base 2 → out [row_blocks, kv_heads, 2, …]."""
    row_block = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    sample = tl.arange(0, ROWS)
    real = sample < PER_BLOCK
    base = lse_ptr + kv_head * key_blocks * samples + row_block * PER_BLOCK
    m = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, key_blocks, BLOCK_K):
        block = start + tl.arange(0, BLOCK_K)
        at = base + block.to(tl.int64)[:, None] * samples + sample[None, :]
        lse = tl.load(at, mask=(block < key_blocks)[:, None] & real[None, :], other=float("-inf"))
        m_new = tl.maximum(m, tl.max(lse, 0))
        total = total * tl.exp2(m - m_new) + tl.sum(tl.exp2(lse - m_new[None, :]), 0)
        m = m_new
    row_lse = m + tl.log2(tl.where(real, total, 1.0))
    odd = sample % 2 == 1
    out = out_ptr + (row_block * KV_HEADS + kv_head) * 2 * out_blocks
    for start in tl.range(0, key_blocks, BLOCK_K):
        block = start + tl.arange(0, BLOCK_K)
        at = base + block.to(tl.int64)[:, None] * samples + sample[None, :]
        lse = tl.load(at, mask=(block < key_blocks)[:, None] & real[None, :], other=float("-inf"))
        mass = tl.exp2(lse - row_lse[None, :])
        even_mass = tl.sum(tl.where(odd[None, :], 0.0, mass), 1) / ((PER_BLOCK + 1) // 2)
        odd_mass = tl.sum(tl.where(odd[None, :], mass, 0.0), 1) / (PER_BLOCK // 2 if PER_BLOCK > 1 else 1)
        tl.store(out + block, even_mass, mask=block < key_blocks)
        tl.store(out + out_blocks + block, odd_mass, mask=block < key_blocks)


def block_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    sample_offsets: torch.Tensor,
    row_block: int,
    key_block: int,
    row_offset: int,
    scale: float,
) -> torch.Tensor:
    """masses [row_blocks, kv_heads, 2, key_blocks] float32."""
    tokens, heads, _ = q.shape
    kv_heads, k_tokens, _ = k.shape
    samples = sample_offsets.shape[2]
    per_block = heads // kv_heads * samples
    row_blocks, key_blocks = triton.cdiv(tokens, row_block), triton.cdiv(k_tokens, key_block)
    starts = torch.arange(0, tokens, row_block, dtype=torch.int32, device=q.device)
    # [kv_heads, row_blocks × group × samples], ascending by row block
    offsets = sample_offsets.view(-1, kv_heads, per_block).transpose(0, 1)
    rows = (starts[:, None] + offsets).clamp(max=tokens - 1)
    masses = torch.zeros(row_blocks, kv_heads, 2, key_blocks, dtype=torch.float32, device=q.device)
    step = max(1, rows_per_pass(kv_heads, key_blocks) // per_block)
    for first in range(0, row_blocks, step):
        last = min(first + step, row_blocks)
        # Only the keys that these row blocks see: behind them the masses stay 0.
        seen = min(k_tokens, row_offset + last * row_block)
        part = rows[:, first:last].reshape(kv_heads, -1).contiguous()
        lse = block_lse(q, k[:, :seen], part, per_head=samples, key_block=key_block, row_offset=row_offset, scale=scale)
        fold_masses_kernel[(last - first, kv_heads)](
            lse, masses[first], part.shape[1], lse.shape[1], key_blocks,
            KV_HEADS=kv_heads, PER_BLOCK=per_block, ROWS=triton.next_power_of_2(per_block),
            BLOCK_K=max(16, 4096 // triton.next_power_of_2(per_block)),
        )  # fmt: skip
    return masses
