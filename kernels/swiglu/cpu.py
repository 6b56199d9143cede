"""The gated activation on the CPU."""

import torch
import torch.nn.functional as F

from kernels.swiglu.reference import swiglu_fp8

__all__ = ["swiglu", "swiglu_fp8"]


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu is rounded to the dtype before the product, as transformers does."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
