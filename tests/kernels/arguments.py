"""Inputs of the kernel tests, and the paths and dtypes that this machine can test."""

import torch

from kernels import dispatch
from kernels.block_lists import BlockLists, lists_from_mask

HAS_GPU = torch.cuda.is_available()
_WITHOUT_TRITON = ("dense_attention", "full_attention", "gated_mlp")
# The interpreter computes bfloat16 products on raw bits, so bfloat16 waits for a GPU.
DTYPES = (torch.bfloat16, torch.float16) if HAS_GPU else (torch.float32, torch.float16)


def paths(op: str) -> list[str]:
    """Every path of `op` but the reference that can run here; Triton's interpreter counts."""
    device = torch.device("cuda" if HAS_GPU else "cpu")
    found = [path for path, obstacle in dispatch.candidates(op, device) if obstacle is None and path != "reference"]
    return found if HAS_GPU or op in _WITHOUT_TRITON else [*found, "triton"]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype).to(device)


def attention_inputs(
    tokens: int, heads: int, kv_heads: int, k_tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = normal(tokens, heads, head_dim, dtype=dtype, device=device, seed=1)
    k = normal(kv_heads, k_tokens, head_dim, dtype=dtype, device=device, seed=2)
    v = normal(kv_heads, k_tokens, head_dim, dtype=dtype, device=device, seed=3)
    return q, k, v


def random_lists(
    tokens: int, row_offset: int, list_heads: int, row_block: int, key_block: int, keep: float, device: torch.device
) -> BlockLists:
    """Lists that keep each causal block with probability `keep`; some of the diagonal may be missing."""
    row_blocks, key_blocks = -(-tokens // row_block), -(-(row_offset + tokens) // key_block)
    mask = torch.rand(row_blocks, list_heads, key_blocks, generator=generator(4)) < keep
    ends = (torch.arange(1, row_blocks + 1) * row_block).clamp(max=tokens) + row_offset
    mask &= (torch.arange(key_blocks) * key_block < ends[:, None])[:, None]
    return lists_from_mask(mask.to(device), row_block=row_block, key_block=key_block)
