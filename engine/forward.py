"""One decoder layer in pieces, each over a tile of rows: what prefill and answer are put together from."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.model import Fp8Matrix, LayerWeights, Matrix, Model
from kernels.fp8_linear import fp8_linear
from kernels.gated_mlp import gated_mlp
from kernels.rms_norm import rms_norm, rms_norm_fp8
from kernels.rope import rope
from kernels.row_quant import quantise_rows
from kernels.swiglu import swiglu_fp8


@dataclass(frozen=True)
class Rotation:
    """cos and sin of consecutive positions, [rows, head_dim / 2] float32."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotation(model: Model, start: int, rows: int) -> Rotation:
    """Of positions [start, start + rows)."""
    positions = torch.arange(start, start + rows, device=model.device, dtype=torch.float32)
    angles = positions[:, None] * model.inverse_frequencies
    return Rotation(angles.cos() * model.rope_factor, angles.sin() * model.rope_factor)


def embed(model: Model, token_ids: torch.Tensor) -> torch.Tensor:
    """[rows] int64 → [rows, hidden]."""
    return F.embedding(token_ids, model.embedding)


def queries_keys_values(
    model: Model, layer: LayerWeights, hidden: torch.Tensor, at: Rotation, *, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [rows, hidden] → q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]; q and k rotated.

    All three are views of one tensor, which is `out` [rows, heads + 2 * kv_heads, head_dim] where given; but models
    that norm q and k return copies of them then, and `out` holds what was before.
    """
    spec = model.spec
    flat = None if out is None else out.view(len(hidden), -1)
    fused, _ = _normed_product(hidden, layer.input_norm, spec.norm_eps, layer.qkv, layer.qkv_bias, out=flat)
    fused = fused.view(len(hidden), -1, spec.head_dim)
    q, k, v = torch.split(fused, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, _ = rms_norm(q.contiguous(), layer.q_norm, eps=spec.norm_eps)
        k, _ = rms_norm(k.contiguous(), layer.k_norm, eps=spec.norm_eps)
        q = rope(q, at.cos, at.sin, interleaved=model.interleaved)
        k = rope(k, at.cos, at.sin, interleaved=model.interleaved)
    else:
        # Side by side in memory: one call turns both, in place.
        rope(fused[:, : spec.heads + spec.kv_heads], at.cos, at.sin, interleaved=model.interleaved)
    return q, k, v


def finish_layer(
    model: Model,
    layer: LayerWeights,
    hidden: torch.Tensor,
    attended: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output projection, residual and MLP. hidden [rows, hidden], attended [rows, heads, head_dim] → [rows, hidden].

    The result is written into `out` where given, which may be `hidden` itself.
    """
    attended = attended.reshape(len(hidden), -1)
    if isinstance(layer.out, Fp8Matrix):
        attended8, scale = quantise_rows(attended)
        projected = fp8_linear(attended8, scale, layer.out.values, layer.out.scale, layer.out_bias)
    else:
        projected = F.linear(attended, layer.out, layer.out_bias)
    if isinstance(layer.gate_up, Fp8Matrix) and isinstance(layer.down, Fp8Matrix):
        gate_up, hidden = _normed_product(
            projected, layer.mlp_norm, model.spec.norm_eps, layer.gate_up, layer.gate_up_bias, residual=hidden
        )
        inner, scale = swiglu_fp8(gate_up)
        moved = fp8_linear(inner, scale, layer.down.values, layer.down.scale, layer.down_bias)
        return torch.add(hidden, moved, out=out)
    assert isinstance(layer.gate_up, torch.Tensor)
    assert isinstance(layer.down, torch.Tensor)
    normed, hidden = rms_norm(projected, layer.mlp_norm, eps=model.spec.norm_eps, residual=hidden)
    result = gated_mlp(
        normed,
        layer.gate_up,
        layer.down,
        residual=hidden,
        gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
    )
    return result if out is None else out.copy_(result)


def _normed_product(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    matrix: Matrix,
    bias: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual) times the matrix, x + residual)."""
    if isinstance(matrix, Fp8Matrix):
        normed, scale, total = rms_norm_fp8(x, norm, eps=eps, residual=residual)
        return fp8_linear(normed, scale, matrix.values, matrix.scale, bias, out=out), total
    normed, total = rms_norm(x, norm, eps=eps, residual=residual)
    if out is None:
        return F.linear(normed, matrix, bias), total
    if bias is None:
        return torch.mm(normed, matrix.T, out=out), total
    return torch.addmm(bias, normed, matrix.T, out=out), total


def logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """Last layer's rows [rows, hidden] → [rows, vocabulary] float32."""
    normed, _ = rms_norm(hidden, model.norm, eps=model.spec.norm_eps)
    return F.linear(normed, model.head).float()
