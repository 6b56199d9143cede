"""One decoder layer in pieces, each over a tile of rows: what prefill and answer are put together from."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.model import LayerWeights, Model
from kernels.gated_mlp import gated_mlp
from kernels.rms_norm import rms_norm
from kernels.rope import rope


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
    model: Model, layer: LayerWeights, hidden: torch.Tensor, at: Rotation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [rows, hidden] → q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]; q and k rotated."""
    spec = model.spec
    normed, _ = rms_norm(hidden, layer.input_norm, eps=spec.norm_eps)
    fused = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(hidden), -1, spec.head_dim)
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


def finish_layer(model: Model, layer: LayerWeights, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Output projection, residual and MLP. hidden [rows, hidden], attended [rows, heads, head_dim] → [rows, hidden]."""
    projected = F.linear(attended.reshape(len(hidden), -1), layer.out, layer.out_bias)
    normed, hidden = rms_norm(projected, layer.mlp_norm, eps=model.spec.norm_eps, residual=hidden)
    return gated_mlp(
        normed,
        layer.gate_up,
        layer.down,
        residual=hidden,
        gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
    )


def logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """Last layer's rows [rows, hidden] → [rows, vocabulary] float32."""
    normed, _ = rms_norm(hidden, model.norm, eps=model.spec.norm_eps)
    return F.linear(normed, model.head).float()
