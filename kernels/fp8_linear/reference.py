"""FP8 products in plain PyTorch, summed in float32."""

import torch


def fp8_linear(
    x: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    product = (x.float() @ weight.float().T) * row_scale * weight_scale.T
    out.copy_(product if bias is None else product + bias.float())
