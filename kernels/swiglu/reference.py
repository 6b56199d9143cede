"""SwiGLU in plain PyTorch."""

import torch

from kernels.rms_norm.reference import quantise_rows


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return _activated(gate_up).to(gate_up.dtype)


def swiglu_fp8(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise_rows(_activated(gate_up))


def _activated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
