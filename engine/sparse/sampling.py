"""Which rows are sampled: from the segment's chain key alone, so that a prefix's KV never depends on what follows."""

import torch

from engine.sparse.settings import SparseSettings


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def choice_rows(settings: SparseSettings, heads: int, random: torch.Generator, *, end: int = 0) -> torch.Tensor:
    """Offsets inside a row block of a segment that ends at position `end`, [heads, samples] int32: one a stratum,
    staggered over the heads."""
    count = settings.sampled_rows_at(end)
    stride = settings.row_block // count
    shift = torch.randint(stride, (1,), generator=random) + torch.arange(heads) * stride // heads
    strata = torch.arange(count) * stride
    return (strata + (shift % stride)[:, None]).to(torch.int32)


def guard_rows(settings: SparseSettings, rows: int, chosen: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Fresh rows of a segment, [heads, guard_rows] int32: one a stratum, none that took part in the choice."""
    heads, count = chosen.shape[0], min(settings.guard_rows, rows)
    strata = torch.arange(count) * rows // count
    width = max(rows // count, 1)
    picked = strata + torch.randint(width, (heads, count), generator=random)
    for _ in range(chosen.shape[1]):
        taken = ((picked % settings.row_block)[..., None] == chosen[:, None]).any(-1)
        picked = torch.where(taken, (picked + 1) % rows, picked)
    return picked.to(torch.int32)
