"""Which key blocks to keep: a held-out budget for a target share of the softmax mass."""

import torch

from kernels import checks, dispatch
from kernels.block_lists import BlockLists


def select_blocks(
    masses: torch.Tensor,
    *,
    target: float | torch.Tensor,
    row_block: int,
    key_block: int,
    row_offset: int = 0,
    sink_blocks: int = 1,
    local_blocks: int = 2,
    smooth_blocks: int = 32,
    budget_factor: float = 1.0,
) -> BlockLists:
    """Block lists that keep `target` of the mass that `block_scores` measured, by held-out budgets.

    masses [row_blocks, kv_heads, 2, key_blocks] float32. The `sink_blocks` first and the `local_blocks` last causal
    blocks stand first in every order. Budget: order the key blocks by one fold and count how many the other fold needs
    to reach `target` of its mass; the same with the folds exchanged; average both counts, and over the row block and
    its neighbours before and behind it within a run of `smooth_blocks` row blocks (one segment, so that nothing
    depends on a later one); times `budget_factor`, rounded up. Kept: the heaviest blocks by the mean of both folds
    until the budget is used, the earlier one where two are equal.

    `target` is one number in (0, 1] or a float32 tensor [row_blocks, kv_heads] (the guard's widening, decided on the
    device). At 1 everything causal is kept. Where the second fold is empty, the first both orders and measures.
    Masses count in steps of 2⁻²⁹, so that every path sums them exactly and chooses the same blocks.

    Returns lists with kv_heads list heads, without a host sync. Raises ValueError for arguments that do not fit.
    """
    target = _check(
        masses, target, row_block, key_block, row_offset, sink_blocks, local_blocks, smooth_blocks, budget_factor
    )
    offsets, blocks = dispatch.implementation("block_selection", masses.device).select_blocks(
        masses.contiguous(),
        target,
        row_block,
        key_block,
        row_offset,
        sink_blocks,
        local_blocks,
        smooth_blocks,
        budget_factor,
    )
    return BlockLists(offsets, blocks, masses.shape[1], row_block, key_block)


def select_mask(
    masses: torch.Tensor,
    *,
    target: float | torch.Tensor,
    row_block: int,
    key_block: int,
    row_offset: int = 0,
    sink_blocks: int = 1,
    local_blocks: int = 2,
    smooth_blocks: int = 32,
    budget_factor: float = 1.0,
) -> torch.Tensor:
    """The same choice as `select_blocks` makes, as a mask [row_blocks, kv_heads, key_blocks] bool of kept blocks.

    Arguments and errors are those of `select_blocks`.
    """
    target = _check(
        masses, target, row_block, key_block, row_offset, sink_blocks, local_blocks, smooth_blocks, budget_factor
    )
    mask: torch.Tensor = dispatch.implementation("block_selection", masses.device).select_mask(
        masses.contiguous(),
        target,
        row_block,
        key_block,
        row_offset,
        sink_blocks,
        local_blocks,
        smooth_blocks,
        budget_factor,
    )
    return mask


def _check(
    masses: torch.Tensor,
    target: float | torch.Tensor,
    row_block: int,
    key_block: int,
    row_offset: int,
    sink_blocks: int,
    local_blocks: int,
    smooth_blocks: int,
    budget_factor: float,
) -> torch.Tensor:
    """The targets as a tensor [row_blocks, kv_heads] float32."""
    checks.shape("masses", masses, "row_blocks", "kv_heads", 2, "key_blocks")
    checks.dtype("masses", masses, torch.float32, torch.float64)
    checks.block_size("row_block", row_block)
    checks.block_size("key_block", key_block)
    checks.at_least("row_offset", row_offset, 0)
    checks.at_least("sink_blocks", sink_blocks, 0)
    checks.at_least("local_blocks", local_blocks, 1)
    checks.at_least("smooth_blocks", smooth_blocks, 1)
    checks.at_least("budget_factor", budget_factor, 0)
    row_blocks, kv_heads, _, key_blocks = masses.shape
    if isinstance(target, torch.Tensor):
        checks.shape("target", target, row_blocks, kv_heads)
        checks.dtype("target", target, torch.float32)
        checks.same_device(masses=masses, target=target)
    elif not 0 < target <= 1:
        raise ValueError(f"target: expected a share in (0, 1], got {target}")
    else:
        target = torch.full((row_blocks, kv_heads), target, dtype=torch.float32, device=masses.device)
    if key_blocks * key_block <= row_offset + (row_blocks - 1) * row_block:
        raise ValueError(f"masses: {key_blocks} key blocks of {key_block} do not reach the rows from {row_offset} on")
    return target.contiguous()
