"""Rotary embedding on the CPU: adjacent pairs are complex numbers, one multiplication turns them."""

import torch

from kernels.rope import reference


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """In place. Only adjacent pairs have a fast form; halves go through the reference."""
    if not interleaved:
        reference.rope(x, cos, sin, interleaved)
        return
    turned = x[..., : 2 * cos.shape[1]]
    wide = torch.promote_types(x.dtype, torch.float32)
    # The copy also makes the memory dense, which view_as_complex needs.
    pairs = torch.view_as_complex(turned.to(wide, copy=True).contiguous().unflatten(-1, (-1, 2)))
    pairs.mul_(torch.complex(cos, sin).to(pairs.dtype)[:, None])
    turned.copy_(torch.view_as_real(pairs).flatten(-2))
