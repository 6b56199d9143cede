"""Every operation against its reference on small shapes: run at worker start and by `foreword check`.

A path that fails is taken out of the dispatch, its reason logged, and the next best one is tried.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels import dispatch
from kernels.block_lists import BlockLists, causal_lists, lists_from_mask
from kernels.block_lse import block_lse
from kernels.block_scores import block_scores
from kernels.block_selection import select_blocks, select_mask
from kernels.block_sparse_attention import block_sparse_attention
from kernels.decode_attention import decode_attention, pages_view
from kernels.dense_attention import dense_attention
from kernels.fp8_linear import fp8_linear
from kernels.full_attention import full_attention
from kernels.gated_mlp import gated_mlp
from kernels.kv_quant import STORED_DTYPES, dequantise_kv, quantise_kv
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from kernels.row_quant import quantise_rows
from kernels.sampled_lse import sampled_lse
from kernels.swiglu import swiglu

Tensors = tuple[torch.Tensor, ...]

# Relative error ‖out − reference‖ / ‖reference‖, the reference fed the same rounded inputs: rounding of the softmax
# weights and of the output leaves 2–3e-3 in bfloat16, FP8 pages multiplied in float16 2e-4; a wrong tile leaves more.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-3}
_TOKENS, _OFFSET, _HEADS, _KV_HEADS = 200, 100, 6, 2
_KEY_BLOCKS = (64, 128)


@dataclass(frozen=True)
class Result:
    """What became of one operation: the path it will take, and the paths that failed on the way to it."""

    op: str
    path: str
    reason: str
    failed: tuple[tuple[str, str], ...]  # (path, why)


def run(
    device: torch.device, *, dtype: torch.dtype | None = None, head_dims: Sequence[int] = (64, 128)
) -> list[Result]:
    """Check every operation on `device` in `dtype` (default: bfloat16 on a GPU, float32 elsewhere).

    Raises RuntimeError when an operation has no path left that works.
    """
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    return [_check(op, cases, device, dtype, head_dims) for op, cases in _CASES.items()]


def _check(
    op: str,
    case: Callable[[torch.device, torch.dtype, int], Tensors],
    device: torch.device,
    dtype: torch.dtype,
    head_dims: Sequence[int],
) -> Result:
    failed: list[tuple[str, str]] = []
    with dispatch.override(op, "reference"):
        expected = [case(device, dtype, head_dim) for head_dim in head_dims]
    while True:
        dispatch.implementation(op, device)
        path, reason = dispatch.paths()[op]
        if path == "reference":
            return Result(op, path, reason, tuple(failed))
        problem = _problem(case, expected, device, dtype, head_dims)
        if problem is None:
            return Result(op, path, reason, tuple(failed))
        failed.append((path, problem))
        dispatch.mark_failed(op, path, device, problem)


def _problem(
    case: Callable[[torch.device, torch.dtype, int], Tensors],
    expected: Sequence[Tensors],
    device: torch.device,
    dtype: torch.dtype,
    head_dims: Sequence[int],
) -> str | None:
    for head_dim, wanted in zip(head_dims, expected, strict=True):
        # Whatever a compiler or a driver may raise, the worker must live on with another path.
        try:
            got = case(device, dtype, head_dim)
            errors = [_relative_error(mine, want) for mine, want in zip(got, wanted, strict=True)]
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:500]
        if not all(error <= TOLERANCE[dtype] for error in errors):
            return f"head_dim {head_dim}: relative errors {', '.join(f'{e:.1e}' for e in errors)}"
    return None


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN, which no tolerance admits, where an infinity is out of place or a value is missing."""
    got, expected = got.double(), expected.double()
    if not torch.equal(got.isinf(), expected.isinf()):
        return float("nan")
    finite = expected.isfinite()
    return float((got - expected)[finite].norm() / expected[finite].norm().clamp(min=1e-12))


def _normal(*shape: int, device: torch.device, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def _attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    k_tokens = _OFFSET + _TOKENS
    q = _normal(_TOKENS, _HEADS, head_dim, device=device, dtype=dtype, seed=1)
    k, v = (_normal(_KV_HEADS, k_tokens, head_dim, device=device, dtype=dtype, seed=s) for s in (2, 3))
    return q, k, v


def _lists(device: torch.device, key_block: int) -> BlockLists:
    """Causal blocks with holes, the same on every device."""
    whole = causal_lists(
        rows=_TOKENS, row_offset=_OFFSET, list_heads=1, row_block=128, key_block=key_block, device="cpu"
    )
    kept = torch.zeros(whole.row_blocks, _KV_HEADS, -(-(_OFFSET + _TOKENS) // key_block), dtype=torch.bool)
    for row_block, last in enumerate(whole.counts[:, 0].tolist()):
        kept[row_block, 0, :last:2] = True
        kept[row_block, 1, last - 1] = True
    return lists_from_mask(kept.to(device), row_block=128, key_block=key_block)


def _sparse(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    q, k, v = _attention(device, dtype, head_dim)
    small, large = (
        block_sparse_attention(q, k, v, _lists(device, key_block), row_offset=_OFFSET) for key_block in _KEY_BLOCKS
    )
    return *small, *large


def _lse(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    q, k, _ = _attention(device, dtype, head_dim)
    rows = torch.arange(0, 60, dtype=torch.int32, device=device).view(_KV_HEADS, 30)
    options = {"per_head": 1, "row_offset": _OFFSET}
    return tuple(block_lse(q, k, rows, key_block=b, scale=head_dim**-0.5, **options) for b in _KEY_BLOCKS)


def _scores(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    q, k, _ = _attention(device, dtype, head_dim)
    offsets = torch.arange(0, 12 * _HEADS, 6, dtype=torch.int32, device=device).view(_HEADS, 2)
    return (block_scores(q, k, offsets, row_block=128, key_block=64, row_offset=_OFFSET),)


def _selection(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    masses = _normal(3, 2, 2, 40, device=device, dtype=torch.float32, seed=head_dim).mul(3).softmax(-1)
    shape = {"row_block": 64, "key_block": 64, "row_offset": 37 * 64}
    lists = select_blocks(masses, target=0.9, **shape)
    return lists.offsets, lists.blocks[: int(lists.offsets[-1])], select_mask(masses, target=0.9, **shape)


def _sampled(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    q, k, _ = _attention(device, dtype, head_dim)
    rows = torch.arange(0, 30 * _HEADS, 5, dtype=torch.int32, device=device).view(_HEADS, 6)
    return sampled_lse(q, k, rows, _lists(device, 64), row_offset=_OFFSET)


def _dense(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    q, k, v = _attention(device, dtype, head_dim)
    return dense_attention(q, k, v, row_offset=_OFFSET)


def _full(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    return full_attention(*_attention(device, dtype, head_dim))


def _decode(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    k, v = (_normal(_KV_HEADS, 384, head_dim, device=device, dtype=dtype, seed=s) for s in (1, 2))
    q = _normal(2, _HEADS, head_dim, device=device, dtype=dtype, seed=3)
    table = torch.tensor([[0, 1, 2], [2, 0, 1]], dtype=torch.int32, device=device)
    lengths = torch.tensor([384, 150], dtype=torch.int32, device=device)
    plain = decode_attention(q, pages_view(k), pages_view(v), table, lengths)
    # Quantised by the reference, so that only the decode is on trial.
    with dispatch.override("kv_quant", "reference"):
        kept = [(quantise_kv(k, dtype=stored), quantise_kv(v, dtype=stored)) for stored in STORED_DTYPES]
    outs = list(plain)
    for (k8, k_scales), (v8, v_scales) in kept:
        pages = pages_view(k8), pages_view(v8)
        outs += decode_attention(q, *pages, table, lengths, k_scales=k_scales.T, v_scales=v_scales.T)
    return tuple(outs)


def _norm(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    x, residual = (_normal(5, 9 * head_dim, device=device, dtype=dtype, seed=s) for s in (1, 2))
    return rms_norm(x, _normal(9 * head_dim, device=device, dtype=dtype, seed=3), residual=residual)


def _rope(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    x = _normal(7, _HEADS, head_dim, device=device, dtype=dtype, seed=1)
    angle = _normal(7, head_dim // 2, device=device, dtype=torch.float32, seed=2)
    return (rope(x, angle.cos(), angle.sin()),)


def _swiglu(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    return (swiglu(_normal(5, 6 * head_dim, device=device, dtype=dtype, seed=1)),)


def _mlp(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    x, residual = (_normal(5, head_dim, device=device, dtype=dtype, seed=s) for s in (1, 2))
    gate_up, down = (_normal(*shape, device=device, dtype=dtype, seed=3) for shape in ((96, head_dim), (head_dim, 48)))
    return (gated_mlp(x, gate_up * 0.1, down, residual=residual),)


def _fp8_linear(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    """Rows that fill a granule and rows that don't, quantised by the reference: only the product is on trial."""
    weight, bias = (_normal(*shape, device=device, dtype=torch.bfloat16, seed=4) for shape in ((96, head_dim), (96,)))
    outs = []
    for rows in (32, 5):
        x = _normal(rows, head_dim, device=device, dtype=torch.bfloat16, seed=rows)
        with dispatch.override("row_quant", "reference"):
            (x8, scale), (w8, w_scale) = quantise_rows(x), quantise_rows(weight)
        outs.append(fp8_linear(x8, scale, w8, w_scale, bias))
    return tuple(outs)


def _rows(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    """Values that FP8 holds exactly, as in `_quantised`."""
    steps = torch.arange(6 * head_dim, device=device) % 15 - 7
    quantised, scale = quantise_rows((steps * 64.0).view(6, head_dim).to(dtype))
    return quantised.float() * scale, scale


def _quantised(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensors:
    """There and back: a value on the edge of two FP8 steps may fall either way, its neighbour 1/16 off; so the values
    are such as FP8 holds exactly, and as lie well between two of INT8's."""
    steps = torch.arange(_KV_HEADS * 300 * head_dim, device=device) % 15 - 7
    x = (steps * 64.0).view(_KV_HEADS, 300, head_dim).to(dtype)
    outs: list[torch.Tensor] = []
    for kept in STORED_DTYPES:
        rounded = torch.empty_like(x)
        stored, scales = quantise_kv(x, dtype=kept, rounded=rounded)
        outs += scales, rounded, dequantise_kv(stored, scales, dtype=dtype)
    return tuple(outs)


_CASES: dict[str, Callable[[torch.device, torch.dtype, int], Tensors]] = {
    "block_sparse_attention": _sparse,
    "block_lse": _lse,
    "block_scores": _scores,
    "block_selection": _selection,
    "sampled_lse": _sampled,
    "dense_attention": _dense,
    "full_attention": _full,
    "decode_attention": _decode,
    "rms_norm": _norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "gated_mlp": _mlp,
    "fp8_linear": _fp8_linear,
    "row_quant": _rows,
    "kv_quant": _quantised,
}
