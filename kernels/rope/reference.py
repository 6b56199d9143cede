"""RoPE in plain PyTorch."""

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    pairs = cos.shape[1]
    compute = torch.promote_types(x.dtype, torch.float32)
    if interleaved:
        first, second = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    else:
        first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    a, b = first.to(compute), second.to(compute)
    cosine, sine = cos.to(compute)[:, None], sin.to(compute)[:, None]
    # Both before either is written: a and b may be views of x.
    turned = a * cosine - b * sine, b * cosine + a * sine
    first.copy_(turned[0])
    second.copy_(turned[1])
