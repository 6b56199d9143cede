"""Block scores in plain PyTorch."""

import torch


def block_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    sample_offsets: torch.Tensor,
    row_block: int,
    key_block: int,
    row_offset: int,
    scale: float,
) -> torch.Tensor:
    """masses [row_blocks, kv_heads, 2, key_blocks], in float64 when q is; offsets [1 or row_blocks, …]."""
    tokens, heads, _ = q.shape
    kv_heads, k_tokens, _ = k.shape
    group, samples = heads // kv_heads, sample_offsets.shape[2]
    compute = torch.promote_types(q.dtype, torch.float32)
    row_blocks, key_blocks = -(-tokens // row_block), -(-k_tokens // key_block)
    offsets = sample_offsets.long().expand(row_blocks, -1, -1)
    fold = torch.arange(group * samples, device=q.device) % 2
    masses = torch.zeros(row_blocks, kv_heads, 2, key_blocks, dtype=compute, device=q.device)
    for block in range(row_blocks):
        rows = (block * row_block + offsets[block]).clamp(max=tokens - 1)  # [heads, samples]
        sampled = q[rows, torch.arange(heads, device=q.device)[:, None]].to(compute)
        sampled = sampled.view(kv_heads, group * samples, -1)
        scores = sampled @ k.to(compute).transpose(1, 2) * scale
        positions = rows.view(kv_heads, group * samples, 1) + row_offset
        scores = scores.masked_fill(torch.arange(k_tokens, device=q.device) > positions, float("-inf"))
        weights = torch.nn.functional.pad(scores.softmax(-1), (0, key_blocks * key_block - k_tokens))
        mass = weights.view(kv_heads, group * samples, key_blocks, key_block).sum(-1)
        for half in range(2):
            if bool((fold == half).any()):
                masses[block, :, half] = mass[:, fold == half].mean(1)
    return masses.float() if compute == torch.float32 else masses
