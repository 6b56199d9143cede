"""Log-sum-exp of gathered rows over every key block: the one pass over the keys that scoring and the guard share."""

import math

import torch

from kernels import checks, dispatch

_SCRATCH_VALUES = 1 << 26  # 256 MiB of float32: callers split their rows to stay under it


def block_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor,
    *,
    per_head: int,
    key_block: int,
    row_offset: int,
    scale: float,
) -> torch.Tensor:
    """Base-2 log-sum-exp of each gathered row's scores over the causal keys of each block, -inf where there is none.

    q [tokens, heads, head_dim], k [kv_heads, k_tokens, head_dim], rows [kv_heads, samples] int32 (dense): rows of q at
    positions rows + row_offset < k_tokens. Sample s belongs to head s // per_head % group of its KV head's group. Rows
    should ascend: a tile of samples whose positions are close together skips its future.

    Returns [kv_heads, key_blocks, samples] float32, key_blocks = ceil(k_tokens / key_block).
    """
    _check(q, k, rows)
    result: torch.Tensor = dispatch.implementation("block_lse", q.device).block_lse(
        q, k, rows, per_head, key_block, row_offset, scale
    )
    return result


def block_masses(
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor,
    *,
    per_head: int,
    key_block: int,
    row_offset: int,
    scale: float,
) -> torch.Tensor:
    """Each gathered row's softmax mass over the causal keys of each block; arguments as of `block_lse`.

    Returns [kv_heads, samples, key_blocks] float32; a row's masses sum to 1.
    """
    _check(q, k, rows)
    path = dispatch.implementation("block_lse", q.device)
    arguments = (q, k, rows, per_head, key_block, row_offset, scale)
    if hasattr(path, "block_masses"):
        masses: torch.Tensor = path.block_masses(*arguments)
    else:
        masses = path.block_lse(*arguments).transpose(1, 2).mul(math.log(2)).softmax(-1)
    return masses


def _check(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor) -> None:
    checks.shape("rows", rows, k.shape[0], "samples")
    checks.dtype("rows", rows, torch.int32)
    checks.same_device(q=q, k=k, rows=rows)
    if not rows.is_contiguous():
        raise ValueError(f"rows: expected a dense tensor, got strides {rows.stride()}")


def rows_per_pass(kv_heads: int, key_blocks: int) -> int:
    """How many samples a KV head may have in one call of `block_lse` for its result to stay within the scratch."""
    return max(1, _SCRATCH_VALUES // (kv_heads * key_blocks))
