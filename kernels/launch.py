"""Launch configurations by shared-memory size: they must fit 227 KiB (sm_90), 163 KiB (sm_80) and 99 KiB (sm_89)."""

from dataclasses import dataclass

import torch

from kernels.dispatch import capability

_SLACK = 1024  # for reductions across warps
_UNKNOWN_SHARED = 99 * 1024  # where no device says more (the interpreter): the smallest of the three


@dataclass(frozen=True)
class Tile:
    """What one program works on, and how."""

    rows: int  # packed rows
    keys: int  # keys a step
    warps: int
    stages: int  # key tiles in flight


def shared_memory_bytes(device: torch.device) -> int:
    return capability(device).shared_memory_bytes or _UNKNOWN_SHARED


def lacks_fp8(device: torch.device) -> bool:
    """Whether Triton can't convert float8_e4m3fn there (CUDA below 8.9)."""
    numbers = capability(device)
    return numbers.device_type == "cuda" and numbers.compute < (8, 9)


def precision(dtype: torch.dtype) -> str:
    """Triton's `input_precision`: full float32 products where the operands are float32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def scoring_tile(head_dim: int, element_size: int, samples: int, key_block: int, shared_bytes: int) -> Tile:
    """Tile of the block-wise log-sum-exp: a query tile, and staged keys without values."""
    width = 1 << (head_dim - 1).bit_length()
    rows = 128 if samples > 64 else max(16, 1 << (samples - 1).bit_length())
    # A whole key block is in flight per stage, however small the steps that it is multiplied in.
    for most_rows, stages in ((128, 3), (128, 2), (64, 2), (64, 1), (16, 1)):
        rows = min(rows, most_rows)
        if (rows + stages * key_block) * width * element_size + _SLACK <= shared_bytes:
            break
    return Tile(rows, min(key_block, 128 if width <= 128 else 64), 8 if rows == 128 else 4, stages)


def block_sparse_tile(q: torch.Tensor, packed_rows: int, key_block: int) -> Tile:
    """Tile of the block-sparse kernel for q's head size and dtype on q's device."""
    return attention_tile(q.shape[2], q.element_size(), packed_rows, key_block, shared_memory_bytes(q.device))


def attention_tile(head_dim: int, element_size: int, packed_rows: int, key_block: int, shared_bytes: int) -> Tile:
    """The largest of a few tiles whose query tile and staged key and value tiles fit `shared_bytes`."""
    width = 1 << (head_dim - 1).bit_length()
    rows = max(16, min(128, 1 << (packed_rows - 1).bit_length()))
    for most_keys, stages in ((128, 3), (128, 2), (64, 3), (64, 2), (32, 2), (32, 1)):
        keys = min(most_keys, key_block)
        for tile_rows in (rows, min(rows, 64)):
            needed = (tile_rows + 2 * stages * keys) * width * element_size
            if needed <= shared_bytes:
                return Tile(tile_rows, keys, 8 if tile_rows >= 128 else 4, stages)
    return Tile(16, 16, 4, 1)
