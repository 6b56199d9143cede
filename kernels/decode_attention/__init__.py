"""Attention of single rows over long stored KV: answering, for a batch of documents of unequal length."""

import torch

from kernels import checks, dispatch
from kernels.kv_quant import STORED_DTYPES

PAGE_TOKENS = 128  # tokens of a page, and of one scale


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one row per entry over the first `lengths` tokens of its pages.

    q [batch, heads, head_dim]; k_pages and v_pages [pages, kv_heads, 128, head_dim] in q's dtype, or float8_e4m3fn or
    int8 with k_scales and v_scales [pages, kv_heads] float32 (value = stored × scale). page_table [batch, max_pages]
    int32, lengths [batch] int32, each in 0 … max_pages * 128. Strides are free but for a dense last dimension, so one
    document's [kv_heads, tokens, head_dim] is a view of pages. Several question rows of a document are entries with
    the same pages and growing lengths.

    Returns (out [batch, heads, head_dim], lse [batch, heads] float32); an entry of length 0 gets 0 and -inf.

    Raises ValueError for shapes, dtypes or devices that do not fit together.
    """
    checks.shape("q", q, "batch", "heads", "head_dim")
    checks.dtype("q", q, *checks.FLOATS)
    batch, heads, head_dim = q.shape
    checks.shape("k_pages", k_pages, "pages", "kv_heads", PAGE_TOKENS, head_dim)
    pages, kv_heads = k_pages.shape[:2]
    checks.shape("v_pages", v_pages, pages, kv_heads, PAGE_TOKENS, head_dim)
    checks.shape("page_table", page_table, batch, "max_pages")
    checks.shape("lengths", lengths, batch)
    checks.dtype("page_table", page_table, torch.int32)
    checks.dtype("lengths", lengths, torch.int32)
    checks.dtype("v_pages", v_pages, k_pages.dtype)
    checks.at_least("batch", batch, 1)
    checks.at_least("max_pages", page_table.shape[1], 1)
    if head_dim not in checks.HEAD_DIMS:
        raise ValueError(f"head_dim: expected one of {checks.HEAD_DIMS}, got {head_dim}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads: expected a multiple of {kv_heads} KV heads, got {heads}")
    if k_pages.dtype in STORED_DTYPES:
        if k_scales is None or v_scales is None:
            raise ValueError("k_scales, v_scales: expected scales [pages, kv_heads] with quantised pages, got None")
        for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
            checks.shape(name, scales, pages, kv_heads)
            checks.dtype(name, scales, torch.float32)
    else:
        checks.dtype("k_pages", k_pages, q.dtype)
        if k_scales is not None or v_scales is not None:
            raise ValueError(f"k_scales, v_scales: expected None with {k_pages.dtype} pages")
    checks.same_device(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        lengths=lengths,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    checks.rows_contiguous(q=q, k_pages=k_pages, v_pages=v_pages, page_table=page_table)
    result: tuple[torch.Tensor, torch.Tensor] = dispatch.implementation("decode_attention", q.device).decode_attention(
        q, k_pages, v_pages, page_table, lengths, k_scales, v_scales, checks.scale(scale, head_dim)
    )
    return result


def pages_view(x: torch.Tensor) -> torch.Tensor:
    """A document's [kv_heads, tokens, head_dim] (tokens a multiple of 128) as pages, without a copy."""
    checks.shape("x", x, "kv_heads", "tokens", "head_dim")
    if x.shape[1] % PAGE_TOKENS:
        raise ValueError(f"tokens: expected a multiple of {PAGE_TOKENS}, got {x.shape[1]}")
    return x.view(x.shape[0], -1, PAGE_TOKENS, x.shape[2]).transpose(0, 1)
