"""Argument checks of the public functions: ValueError with what was got and what was expected."""

import torch

HEAD_DIMS = (64, 96, 128, 256)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def shape(name: str, tensor: torch.Tensor, *expected: int | str) -> None:
    """`expected` has an int where the size is fixed and a name where any size will do."""
    fits = tensor.dim() == len(expected) and all(
        not isinstance(want, int) or want == got for want, got in zip(expected, tensor.shape, strict=False)
    )
    if not fits:
        raise ValueError(f"{name}: expected shape [{', '.join(map(str, expected))}], got {list(tensor.shape)}")


def dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(f"{name}: expected dtype {' or '.join(map(str, allowed))}, got {tensor.dtype}")


def same_device(**tensors: torch.Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(
            "expected one device, got " + ", ".join(f"{name} on {where}" for name, where in devices.items())
        )


def rows_contiguous(**tensors: torch.Tensor | None) -> None:
    """The last dimension must be dense; all other strides are free."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: expected stride 1 in the last dimension, got strides {tensor.stride()}")


def at_least(name: str, got: float, smallest: float) -> None:
    if not got >= smallest:
        raise ValueError(f"{name}: expected at least {smallest}, got {got}")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, row_offset: int) -> None:
    """Shapes of causal attention: q [tokens, heads, head_dim], k and v [kv_heads, k_tokens, head_dim]."""
    shape("q", q, "tokens", "heads", "head_dim")
    head_dim = q.shape[2]
    shape("k", k, "kv_heads", "k_tokens", head_dim)
    dtype("q", q, *FLOATS)
    dtype("k", k, q.dtype)
    if v is not None:
        shape("v", v, k.shape[0], k.shape[1], head_dim)
        dtype("v", v, q.dtype)
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: expected one of {HEAD_DIMS}, got {head_dim}")
    if k.shape[0] < 1 or q.shape[1] < 1 or q.shape[1] % k.shape[0]:
        raise ValueError(f"heads: expected a multiple of {k.shape[0]} KV heads, got {q.shape[1]}")
    at_least("tokens", q.shape[0], 1)
    at_least("k_tokens", k.shape[1], 1)
    at_least("row_offset", row_offset, 0)
    if row_offset + q.shape[0] > k.shape[1]:
        raise ValueError(f"k: expected at least row_offset + tokens = {row_offset + q.shape[0]} keys, got {k.shape[1]}")
    same_device(q=q, k=k, v=v)
    rows_contiguous(q=q, k=k, v=v)


def block_size(name: str, got: int) -> None:
    if got < 16 or got & (got - 1):
        raise ValueError(f"{name}: expected a power of two of at least 16, got {got}")


def scale(got: float | None, head_dim: int) -> float:
    """The factor of the scores, head_dim ** -0.5 where none is given. Online softmax takes maxima before it."""
    if got is None:
        return float(head_dim**-0.5)
    if not got > 0:
        raise ValueError(f"scale: expected a positive number, got {got}")
    return got
