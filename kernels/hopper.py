"""What the Gluon kernels for Hopper share: names that differ between Triton versions, and what TMA asks for."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from kernels.dispatch import Capability

SHARED_BYTES = 227 * 1024

# Newer Tritons renamed these two.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
group_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


def unsupported_hopper(numbers: Capability) -> str | None:
    """Why wgmma and TMA kernels can't run on a device, or None."""
    if numbers.compute[0] != 9:
        return f"compute capability {numbers.compute}, wgmma needs 9.x"
    if numbers.shared_memory_bytes < SHARED_BYTES:
        return f"{numbers.shared_memory_bytes} bytes of shared memory a block, needs {SHARED_BYTES}"
    return None


def aligned_for_tma(*tensors: torch.Tensor) -> bool:
    """Whether [heads, tokens, head_dim] tensors of 16-bit floats can be described to TMA: 16-byte bases and strides."""
    return all(
        t.dtype in (torch.float16, torch.bfloat16)
        and t.data_ptr() % 16 == 0
        and all(stride % 8 == 0 for stride in t.stride()[:2])
        for t in tensors
    )


def element(dtype: torch.dtype) -> gl.dtype:
    return gl.float16 if dtype == torch.float16 else gl.bfloat16
