"""Dense causal attention through FlashAttention-3 (the `fa3-fwd` distribution), when it is installed."""

import torch

from kernels.dispatch import Capability
from kernels.full_attention.fa3 import flash
from kernels.full_attention.fa3 import unsupported as flash_unsupported


def unsupported(numbers: Capability) -> str | None:
    return flash_unsupported(numbers)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse). The causal mask is aligned to the last key, which is row_offset + tokens - 1 here."""
    return flash(q, k, v, True, scale)
