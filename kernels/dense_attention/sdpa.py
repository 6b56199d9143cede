"""Dense causal attention through PyTorch's fused kernels (FlashAttention-2 on any CUDA device since sm_80)."""

import torch

from kernels.dispatch import Capability

_PREFIX_ROWS = 8192  # a merged prefix keeps two outputs of this many rows


def unsupported(numbers: Capability) -> str | None:
    if numbers.compute < (8, 0):
        return f"compute capability {numbers.compute}, flash attention needs (8, 0)"
    return None


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse). Rows behind an offset attend to the past without a mask and to themselves causally; both merge."""
    if row_offset == 0:
        return _flash(q, k, v, True, scale)
    outs, lses = [], []
    for start in range(0, q.shape[0], _PREFIX_ROWS):
        rows = q[start : start + _PREFIX_ROWS]
        past, end = row_offset + start, row_offset + start + rows.shape[0]
        near, near_lse = _flash(rows, k[:, past:end], v[:, past:end], True, scale)
        far, far_lse = _flash(rows, k[:, :past], v[:, :past], False, scale)
        lse = torch.logaddexp(near_lse, far_lse)
        share = (near_lse - lse).exp()[..., None]
        outs.append((near * share + far * (1 - share)).to(q.dtype))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[0]
    keys, values = (t.repeat_interleave(group, 0)[None] for t in (k, v))
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        q.transpose(0, 1)[None], keys, values, 0.0, causal, False, scale=scale
    )
    out, lse = result[0], result[1]
    return out[0].transpose(0, 1), lse[0].T
