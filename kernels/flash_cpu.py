"""PyTorch's fused attention on the CPU, with its log-sum-exp: what the `cpu` paths of the attention ops stand on.

`torch.ops.aten._scaled_dot_product_flash_attention_for_cpu` is a private name (present in torch 2.11 to 2.13), so it
is looked for and tried once; without it the `cpu` paths declare themselves unsupported and the references run.
"""

from functools import cache

import torch
from torch.nn.functional import pad

_OP = "_scaled_dot_product_flash_attention_for_cpu"
# From this many rows and keys on PyTorch multiplies 16-bit tiles by kernels that it compiles for each pair of sizes and
# thread, about 100 KB, and keeps for ever: documents and questions of all lengths would grow a process without end. So
# both are padded to this granule.
_GRANULE = 64
_COMPILED = (torch.bfloat16, torch.float16)


@cache
def obstacle() -> str | None:
    """Why the fused attention can't be used here, None where it can."""
    if not hasattr(torch.ops.aten, _OP):
        return f"this PyTorch ({torch.__version__}) has no aten::{_OP}"
    sample = torch.linspace(-1, 1, 2 * 3 * 4).view(1, 2, 3, 4)
    try:
        out, lse = flash(sample[0], sample[0], sample[0], scale=0.5)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"aten::{_OP} does not take these arguments: {error}"
    scores = sample[0] @ sample[0].transpose(1, 2) * 0.5
    if not torch.allclose(lse, scores.logsumexp(-1)) or not torch.allclose(out, scores.softmax(-1) @ sample[0]):
        return f"aten::{_OP} gives another result than expected"
    return None


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention head by head: q [heads, rows, head_dim], k and v [heads, keys, head_dim].

    Returns (out [heads, rows, head_dim], lse [heads, rows] float32, natural logarithm).
    """
    out, lse = flash_batch(q[None], k[None], v[None], scale=scale)
    return out[0], lse[0]


def flash_batch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over a leading batch dimension of all three.

    `causal` aligns the first row with the first key. `mask` [batch, heads, rows, keys] is added to the scores; with one
    the operation is 1.2–1.8 times slower than an unmasked past and a causal diagonal, merged by their log-sum-exps
    (`merge`). A causal call has as many rows as keys.
    """
    rows, keys = q.shape[2], k.shape[2]
    if q.dtype not in _COMPILED or min(rows, keys) < _GRANULE:
        return _fused(q, k, v, scale=scale, causal=causal, mask=mask)
    spare_rows, spare_keys = -rows % _GRANULE, -keys % _GRANULE
    if spare_rows:
        q = pad(q, (0, 0, 0, spare_rows))
    if mask is not None:
        mask = pad(pad(mask, (0, spare_keys), value=-torch.inf), (0, 0, 0, spare_rows))  # padded rows see something
    if spare_keys and not causal and mask is None:
        whole = keys - keys % _GRANULE
        out, lse = _fused(q, k[:, :, :whole], v[:, :, :whole], scale=scale)
        rest_mask = torch.zeros(_GRANULE, dtype=q.dtype)
        rest_mask[keys - whole :] = -torch.inf
        rest_k, rest_v = (pad(x[:, :, whole:], (0, 0, 0, spare_keys)) for x in (k, v))
        rest, rest_lse = _fused(
            q, rest_k, rest_v, scale=scale, mask=rest_mask.expand(*q.shape[:2], q.shape[2], _GRANULE)
        )
        merged, lse = merge(out, lse, rest, rest_lse)
        return merged[:, :, :rows].to(q.dtype), lse[:, :, :rows]
    if spare_keys:
        # Behind the causal diagonal, or masked: no real row sees them.
        k, v = (pad(x, (0, 0, 0, spare_keys)) for x in (k, v))
    out, lse = _fused(q, k, v, scale=scale, causal=causal, mask=mask)
    return out[:, :, :rows], lse[:, :, :rows]


def _fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = getattr(torch.ops.aten, _OP)(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets; out [..., head_dim] of any dtype, lse [...] float32.

    Returns (out float32, lse). Where both sets are empty (lse −inf) the result is 0 and −inf.
    """
    both = torch.logaddexp(lse, other_lse)
    # exp(-inf - -inf) is NaN; a finite stand-in gives weights of 0 there.
    base = both.nan_to_num(neginf=0.0)
    weight, other_weight = (lse - base).exp()[..., None], (other_lse - base).exp()[..., None]
    return out * weight + other * other_weight, both


def pack(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[rows, heads, head_dim] → [kv_heads, rows * group, head_dim]: a group's rows share their keys."""
    rows, heads, head_dim = q.shape
    group = heads // kv_heads
    return q.unflatten(1, (kv_heads, group)).transpose(0, 1).reshape(kv_heads, rows * group, head_dim)


def unpack(out: torch.Tensor, lse: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The reverse, for an output and its log-sum-exp: [rows, heads, head_dim] and [rows, heads]."""
    kv_heads, packed, head_dim = out.shape
    rows = packed // group
    out = (
        out.view(kv_heads, rows, group, head_dim)
        if out.is_contiguous()
        else out.reshape(kv_heads, rows, group, head_dim)
    )
    lse = lse.reshape(kv_heads, rows, group)
    return (
        out.transpose(0, 1).reshape(rows, kv_heads * group, head_dim),
        lse.transpose(0, 1).reshape(rows, kv_heads * group),
    )
