"""Dense causal attention through PyTorch's fused kernels (FlashAttention-2 on any CUDA device since sm_80)."""

import torch

from kernels.dispatch import Capability
from kernels.full_attention.sdpa import flash
from kernels.full_attention.sdpa import unsupported as flash_unsupported

_ROWS = 8192  # rows behind an offset keep two outputs until they are merged


def unsupported(numbers: Capability) -> str | None:
    return flash_unsupported(numbers)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse). Rows behind an offset attend to the past without a mask and to themselves causally; both merge."""
    if row_offset == 0:
        return flash(q, k, v, True, scale)
    outs, lses = [], []
    for start in range(0, q.shape[0], _ROWS):
        rows = q[start : start + _ROWS]
        past, end = row_offset + start, row_offset + start + rows.shape[0]
        near, near_lse = flash(rows, k[:, past:end], v[:, past:end], True, scale)
        far, far_lse = flash(rows, k[:, :past], v[:, :past], False, scale)
        lse = torch.logaddexp(near_lse, far_lse)
        share = (near_lse - lse).exp()[..., None]
        outs.append((near * share + far * (1 - share)).to(q.dtype))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
