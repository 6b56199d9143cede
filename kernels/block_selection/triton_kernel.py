"""Block selection in Triton: thresholds by bisection over fixed-point masses, then a compaction in order.

Counts and masses are integers, so sums do not depend on their order and every path chooses the same blocks.
"""

import torch
import triton
import triton.language as tl

from kernels.block_selection import reference
from kernels.block_selection.budget import FORCED, STEPS, TARGET_STEPS, budgets, causal_counts, target_steps

_STEPS = tl.constexpr(STEPS)
_FORCED = tl.constexpr(FORCED)
_TARGET_STEPS = tl.constexpr(TARGET_STEPS)
_MOST_BLOCKS = 1 << 16  # what a program's registers hold: 8M tokens in blocks of 128; above, the reference sorts
_BISECTIONS = tl.constexpr(31)  # thresholds lie in 0 … FORCED < 2³¹


@triton.jit
def _fixed(ptr, block, causal):
    """Masses as integers; 0 for blocks in the future."""
    return (tl.load(ptr + block, mask=block < causal, other=0.0) * _STEPS + 0.5).to(tl.int32)


@triton.jit
def _order_key(mass, block, causal, SINK: tl.constexpr, LOCAL: tl.constexpr):
    forced = (block < SINK) | (block >= causal - LOCAL)
    return tl.where(block < causal, tl.where(forced, _FORCED, mass), -1)


@triton.jit
def _needed(key, mass, causal, share):
    """How many blocks, in descending order of `key`, hold `share` of `mass`. Whole sums are below 2³⁰."""
    wanted = (tl.sum(mass).to(tl.int64) * share + _TARGET_STEPS - 1) // _TARGET_STEPS
    low, high = tl.zeros([], tl.int32), tl.zeros([], tl.int32) + _FORCED
    for _ in tl.range(0, _BISECTIONS):
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(key >= middle, mass, 0)).to(tl.int64) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return tl.where(share >= _TARGET_STEPS, causal, tl.sum((key >= low).to(tl.int32)))


@triton.jit
def needed_kernel(masses_ptr, causal_ptr, share_ptr, needed_ptr, key_blocks, KV_HEADS: tl.constexpr,
                  SINK: tl.constexpr, LOCAL: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """needed[list] = blocks that fold 1 needs in fold 0's order + blocks that fold 0 needs in fold 1's order."""
    index = tl.program_id(0).to(tl.int64)
    causal = tl.load(causal_ptr + index // KV_HEADS)
    share = tl.load(share_ptr + index)
    block = tl.arange(0, BLOCKS)
    first = _fixed(masses_ptr + index * 2 * key_blocks, block, causal)
    second = _fixed(masses_ptr + (index * 2 + 1) * key_blocks, block, causal)
    second = tl.where(tl.sum(second) == 0, first, second)
    count = _needed(_order_key(first, block, causal, SINK, LOCAL), second, causal, share)
    count += _needed(_order_key(second, block, causal, SINK, LOCAL), first, causal, share)
    tl.store(needed_ptr + index, count)


@triton.jit
def fill_kernel(masses_ptr, causal_ptr, budget_ptr, offsets_ptr, out_ptr, key_blocks, KV_HEADS: tl.constexpr,
                SINK: tl.constexpr, LOCAL: tl.constexpr, BLOCKS: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Each list's heaviest blocks, as many as its budget says: in ascending order, or as a mask of all blocks."""
    index = tl.program_id(0).to(tl.int64)
    causal = tl.load(causal_ptr + index // KV_HEADS)
    budget = tl.load(budget_ptr + index)
    block = tl.arange(0, BLOCKS)
    first = _fixed(masses_ptr + index * 2 * key_blocks, block, causal)
    second = _fixed(masses_ptr + (index * 2 + 1) * key_blocks, block, causal)
    second = tl.where(tl.sum(second) == 0, first, second)
    key = _order_key(first + second, block, causal, SINK, LOCAL)
    # Largest threshold that at least `budget` blocks reach; of those that equal it the earliest fill the rest.
    low, high = tl.zeros([], tl.int32), tl.zeros([], tl.int32) + (_FORCED + 1)
    for _ in tl.range(0, _BISECTIONS):
        middle = low + (high - low) // 2
        enough = tl.sum((key >= middle).to(tl.int32)) >= budget
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    equal = (key == low).to(tl.int32)
    room = budget - tl.sum((key > low).to(tl.int32))
    keep = (key > low) | ((equal == 1) & (tl.cumsum(equal) <= room))
    if MASK:
        tl.store(out_ptr + index * key_blocks + block, keep.to(tl.int8), mask=block < key_blocks)
    else:
        rank = tl.cumsum(keep.to(tl.int32)) - 1
        tl.store(out_ptr + tl.load(offsets_ptr + index) + rank, block, mask=keep)


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
    """(offsets, blocks) of the block lists; `blocks` has room for every block, so that no count reaches the host."""
    row_blocks, kv_heads, _, key_blocks = masses.shape
    if key_blocks > _MOST_BLOCKS:
        return reference.select_blocks(
            masses, target, row_block, key_block, row_offset, sink_blocks, local_blocks, smooth_blocks, budget_factor
        )
    choice = _Choice(
        masses, target, row_block, key_block, row_offset, sink_blocks, local_blocks, smooth_blocks, budget_factor
    )
    offsets = torch.zeros(row_blocks * kv_heads + 1, dtype=torch.int64, device=masses.device)
    torch.cumsum(choice.budget.view(-1), 0, out=offsets[1:])
    blocks = torch.empty(row_blocks * kv_heads * key_blocks, dtype=torch.int32, device=masses.device)
    choice.fill(offsets, blocks, mask=False)
    return offsets, blocks


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
    row_blocks, kv_heads, _, key_blocks = masses.shape
    if key_blocks > _MOST_BLOCKS:
        return reference.select_mask(
            masses, target, row_block, key_block, row_offset, sink_blocks, local_blocks, smooth_blocks, budget_factor
        )
    choice = _Choice(
        masses, target, row_block, key_block, row_offset, sink_blocks, local_blocks, smooth_blocks, budget_factor
    )
    mask = torch.empty(row_blocks, kv_heads, key_blocks, dtype=torch.int8, device=masses.device)
    choice.fill(None, mask, mask=True)
    return mask.view(torch.bool)


class _Choice:
    """Every list's budget, and the launch that fills it."""

    def __init__(
        self,
        masses: torch.Tensor,
        target: torch.Tensor,
        row_block: int,
        key_block: int,
        row_offset: int,
        sink_blocks: int,
        local_blocks: int,
        smooth_blocks: int,
        budget_factor: float,
    ) -> None:
        row_blocks, kv_heads, _, self._key_blocks = masses.shape
        self._masses = masses.float()
        self._causal = causal_counts(row_blocks, row_block, key_block, row_offset, self._key_blocks, masses.device)
        needed = torch.empty(row_blocks, kv_heads, dtype=torch.int32, device=masses.device)
        held = max(32, triton.next_power_of_2(self._key_blocks))
        self._constants = {"KV_HEADS": kv_heads, "SINK": sink_blocks, "LOCAL": local_blocks, "BLOCKS": held}
        self._constants["num_warps"] = max(1, min(32, held // 1024))  # 32 blocks a thread stay in registers
        self._grid = (row_blocks * kv_heads,)
        needed_kernel[self._grid](
            self._masses, self._causal, target_steps(target), needed, self._key_blocks, **self._constants
        )
        forced = sink_blocks + local_blocks
        self.budget = budgets(
            needed, self._causal, forced=forced, smooth_blocks=smooth_blocks, budget_factor=budget_factor
        )

    def fill(self, offsets: torch.Tensor | None, out: torch.Tensor, *, mask: bool) -> None:
        fill_kernel[self._grid](
            self._masses, self._causal, self.budget, offsets, out, self._key_blocks, MASK=mask, **self._constants
        )
