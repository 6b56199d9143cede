"""One decoder layer in pieces, each over a tile of rows: what prefill and answer are put together from."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.model import LayerWeights, Model


@dataclass(frozen=True)
class Rotation:
    """cos and sin of consecutive positions, [rows, 1, head_dim / 2] float32."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotation(model: Model, start: int, rows: int) -> Rotation:
    """Of positions [start, start + rows)."""
    positions = torch.arange(start, start + rows, device=model.device, dtype=torch.float32)
    angles = positions[:, None, None] * model.inverse_frequencies
    return Rotation(angles.cos() * model.rope_factor, angles.sin() * model.rope_factor)


def embed(model: Model, token_ids: torch.Tensor) -> torch.Tensor:
    """[rows] int64 → [rows, hidden]."""
    return F.embedding(token_ids, model.embedding)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, in float32; rounded before the weight is applied, as transformers does."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def _rotate(x: torch.Tensor, at: Rotation) -> torch.Tensor:
    """Rotate the two halves of each head. [rows, heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.empty_like(x)
    half = first.shape[-1]
    turned[..., :half] = first * at.cos - second * at.sin
    turned[..., half:] = second * at.cos + first * at.sin
    return turned


def queries_keys_values(
    model: Model, layer: LayerWeights, hidden: torch.Tensor, at: Rotation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [rows, hidden] → q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]; q and k rotated."""
    spec = model.spec
    normed = rms_norm(hidden, layer.input_norm, spec.norm_eps)
    fused = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(hidden), -1, spec.head_dim)
    q, k, v = torch.split(fused, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, spec.norm_eps), rms_norm(k, layer.k_norm, spec.norm_eps)
    return _rotate(q, at), _rotate(k, at), v


def finish_layer(model: Model, layer: LayerWeights, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Output projection, residual and MLP. hidden [rows, hidden], attended [rows, heads, head_dim] → [rows, hidden]."""
    hidden = hidden + F.linear(attended.reshape(len(hidden), -1), layer.out, layer.out_bias)
    normed = rms_norm(hidden, layer.mlp_norm, model.spec.norm_eps)
    gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)


def logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """Last layer's rows [rows, hidden] → [rows, vocabulary] float32."""
    return F.linear(rms_norm(hidden, model.norm, model.spec.norm_eps), model.head).float()
