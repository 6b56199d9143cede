"""Decode attention in plain PyTorch, one entry at a time."""

import torch


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse); computed in float64 when q is float64, otherwise in float32."""
    compute = torch.promote_types(q.dtype, torch.float32)
    heads, kv_heads, page_tokens = q.shape[1], k_pages.shape[1], k_pages.shape[2]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    for entry, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        pages = page_table[entry, : -(-length // page_tokens)].long()

        def gathered(
            stored: torch.Tensor,
            scales: torch.Tensor | None,
            pages: torch.Tensor = pages,
            length: int = length,
        ) -> torch.Tensor:
            values = stored[pages].to(compute)
            if scales is not None:
                values = values * scales[pages].to(compute)[..., None, None]
            return values.transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(heads // kv_heads, 0)

        scores = (gathered(k_pages, k_scales) @ q[entry].to(compute)[..., None])[..., 0] * scale
        lse[entry] = scores.logsumexp(-1).float()
        out[entry] = (scores.softmax(-1)[:, None] @ gathered(v_pages, v_scales))[:, 0].to(q.dtype)
    return out, lse
