"""The parts of the selection that are small: fixed-point masses, causal and forced blocks, budgets."""

import torch

STEPS = 1 << 29  # fixed-point steps of a mass of 1; two folds' sum still fits an int32
FORCED = (1 << 30) + 1  # orders before any mass
TARGET_STEPS = 1 << 16


def causal_counts(
    row_blocks: int, row_block: int, key_block: int, row_offset: int, key_blocks: int, device: torch.device
) -> torch.Tensor:
    """Key blocks that hold a key not in the future of a row block's last row: [row_blocks] int32."""
    last = torch.arange(1, row_blocks + 1, device=device) * row_block + (row_offset - 1)
    return (last // key_block + 1).clamp(max=key_blocks).to(torch.int32)


def target_steps(target: torch.Tensor) -> torch.Tensor:
    """Shares in (0, 1] as int32 multiples of 1 / TARGET_STEPS, rounded."""
    return (target * TARGET_STEPS).round().clamp(1, TARGET_STEPS).to(torch.int32)


def budgets(
    needed: torch.Tensor, causal: torch.Tensor, *, forced: int, smooth_blocks: int, budget_factor: float
) -> torch.Tensor:
    """Blocks to keep, [row_blocks, kv_heads] int32; `needed`, of that shape, is both folds' counts added up."""
    row_blocks = needed.shape[0]
    needed = needed.double()
    run = torch.arange(row_blocks, device=needed.device) // smooth_blocks
    joined = (run[1:] == run[:-1])[:, None].double()
    total, weight = needed.clone(), torch.ones_like(needed)
    total[1:] += needed[:-1] * joined
    weight[1:] += joined
    total[:-1] += needed[1:] * joined
    weight[:-1] += joined
    budget = (total / (2 * weight) * budget_factor).ceil().clamp(min=forced).to(torch.int32)
    return torch.minimum(budget, causal[:, None])
