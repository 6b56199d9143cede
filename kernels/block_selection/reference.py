"""Block selection in plain PyTorch, by sorting."""

import torch

from kernels.block_lists import lists_from_mask
from kernels.block_selection.budget import FORCED, STEPS, TARGET_STEPS, budgets, causal_counts, target_steps


def select_blocks(
    masses: torch.Tensor,
    target: torch.Tensor,
    row_block: int,
    key_block: int,
    row_offset: int,
    sink_blocks: int,
    local_blocks: int,
    smooth_blocks: int,
    budget_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets, blocks) of the block lists."""
    mask = select_mask(
        masses, target, row_block, key_block, row_offset, sink_blocks, local_blocks, smooth_blocks, budget_factor
    )
    lists = lists_from_mask(mask, row_block=row_block, key_block=key_block)
    return lists.offsets, lists.blocks


def select_mask(
    masses: torch.Tensor,
    target: torch.Tensor,
    row_block: int,
    key_block: int,
    row_offset: int,
    sink_blocks: int,
    local_blocks: int,
    smooth_blocks: int,
    budget_factor: float,
) -> torch.Tensor:
    """[row_blocks, kv_heads, key_blocks] bool."""
    row_blocks, _, _, key_blocks = masses.shape
    causal = causal_counts(row_blocks, row_block, key_block, row_offset, key_blocks, masses.device)
    block = torch.arange(key_blocks, device=masses.device)
    seen = block < causal[:, None]
    forced = seen & ((block < sink_blocks) | (block >= causal[:, None] - local_blocks))
    steps = (masses.float() * STEPS + 0.5).long().masked_fill(~seen[:, None, None], 0)
    first, second = steps.unbind(2)
    second = torch.where(second.sum(-1, keepdim=True) == 0, first, second)

    def order_key(mass: torch.Tensor) -> torch.Tensor:
        return mass.masked_fill(forced[:, None], FORCED).masked_fill(~seen[:, None], -1)

    share = target_steps(target)
    needed = _needed(order_key(first), second, share, causal) + _needed(order_key(second), first, share, causal)
    budget = budgets(
        needed, causal, forced=sink_blocks + local_blocks, smooth_blocks=smooth_blocks, budget_factor=budget_factor
    )
    order = order_key(first + second).sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(-1, order, block.expand_as(order))
    return rank < budget[..., None]


def _needed(key: torch.Tensor, mass: torch.Tensor, share: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
    """How many blocks in descending order of `key` hold `share` of `mass`; blocks of equal key count together."""
    order = key.argsort(dim=-1, descending=True)
    reached = mass.gather(-1, order).cumsum(-1)
    wanted = (reached[..., -1:] * share[..., None].long() + TARGET_STEPS - 1) // TARGET_STEPS
    threshold = key.gather(-1, order).gather(-1, (reached < wanted).sum(-1, keepdim=True).clamp(max=key.shape[-1] - 1))
    needed = (key >= threshold.clamp(min=0)).sum(-1)
    return torch.where(share >= TARGET_STEPS, causal[:, None].long(), needed)
