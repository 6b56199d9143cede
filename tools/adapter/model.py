"""The Llama forward pass of training and evaluation: frozen stacked weights, low-rank updates merged anew every step.

Merging `W + scale * B @ A` in float32 and rounding to bfloat16 gives, but for the rounding of the saved factors, the
weights that are served later, so the adapter is trained on what will run. Rotary angles are computed in float32: at
64K positions bfloat16 frequencies are ruinous.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PROJECTIONS = ("q", "k", "v", "o")
SCALE = 2.0
ROPE_BASE = 8_000_000.0

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]) → [rows, heads, head_dim]; q, k after RoPE."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes from a Hugging Face `config.json` of a Llama model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_base: float


class Base:
    """Frozen weights of a Llama folder, stacked over the layers: `self.stacked["q"]` is `[layers, out, in]`."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        config = json.loads((folder / "config.json").read_text())
        heads = config["num_attention_heads"]
        self.shape = Shape(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            eps=config["rms_norm_eps"],
            rope_base=float((config.get("rope_parameters") or config)["rope_theta"]),
        )
        tensors = load_file(folder / "model.safetensors")
        self.device, self.dtype = device, dtype
        self.embedding = tensors["model.embed_tokens.weight"].to(device, dtype)
        self.final_norm = tensors["model.norm.weight"].to(device, dtype)

        def stack(name: str) -> Tensor:
            layers = [tensors[f"model.layers.{i}.{name}.weight"] for i in range(self.shape.layers)]
            return torch.stack(layers).to(device, dtype)

        self.stacked = {p: stack(f"self_attn.{p}_proj") for p in PROJECTIONS}
        self.gate_up = torch.cat([stack("mlp.gate_proj"), stack("mlp.up_proj")], dim=1)
        self.down = stack("mlp.down_proj")
        self.norm1, self.norm2 = stack("input_layernorm"), stack("post_attention_layernorm")

    def merged(self, adapter: "Adapter | None") -> "Projections":
        """Attention projections with the adapter added; differentiable in the adapter."""
        if adapter is None:
            weights = self.stacked
        else:
            weights = {p: (w.float() + adapter.delta(p)).to(self.dtype) for p, w in self.stacked.items()}
        qkv = torch.cat([weights["q"], weights["k"], weights["v"]], dim=1)
        return Projections(qkv.unbind(0), weights["o"].unbind(0))

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, projections: "Projections", rope_base: float = ROPE_BASE
    ) -> Tensor:
        """Final-norm hidden states `[rows, hidden]` of token ids `[rows]` at integer positions `[rows]`."""
        shape = self.shape
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        cos, sin = rotary_tables(positions, rope_base, shape.head_dim)
        x = F.embedding(ids, self.embedding)
        for i in range(shape.layers):
            h = F.rms_norm(x, (shape.hidden,), self.norm1[i], shape.eps)
            q, k, v = F.linear(h, projections.qkv[i]).split([q_size, kv_size, kv_size], dim=-1)
            q = rotate(q.unflatten(-1, (shape.heads, shape.head_dim)), cos, sin)
            k = rotate(k.unflatten(-1, (shape.kv_heads, shape.head_dim)), cos, sin)
            out = attend(i, q, k, v.unflatten(-1, (shape.kv_heads, shape.head_dim)))
            x = x + F.linear(out.flatten(-2), projections.o[i])
            h = F.rms_norm(x, (shape.hidden,), self.norm2[i], shape.eps)
            x = x + F.linear(swiglu(F.linear(h, self.gate_up[i])), self.down[i])
        return F.rms_norm(x, (shape.hidden,), self.final_norm, shape.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits `[rows, vocabulary]`."""
        return F.linear(hidden, self.embedding).float()


@dataclass(frozen=True, slots=True)
class Projections:
    """Merged attention weights a layer: `qkv[i]` `[(heads + 2 kv_heads) * head_dim, hidden]` and `o[i]`."""

    qkv: tuple[Tensor, ...]
    o: tuple[Tensor, ...]


class Adapter(nn.Module):
    """Low-rank factors of the attention projections: `a` `[layers, rank, in]`, `b` `[layers, out, rank]`, float32."""

    def __init__(self, base: Base, rank: int = 64) -> None:
        super().__init__()
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for p, weight in base.stacked.items():
            layers, outputs, inputs = weight.shape
            self.a[p] = nn.Parameter(torch.randn(layers, rank, inputs, device=base.device) / math.sqrt(inputs))
            self.b[p] = nn.Parameter(torch.zeros(layers, outputs, rank, device=base.device))

    def delta(self, p: str) -> Tensor:
        return SCALE * torch.bmm(self.b[p], self.a[p])

    def save(self, path: Path) -> None:
        """Write bfloat16 tensors `{layer}.{p}.a` and `{layer}.{p}.b`."""
        tensors = {}
        for p in PROJECTIONS:
            for name, stacked in (("a", self.a[p]), ("b", self.b[p])):
                for i, tensor in enumerate(stacked.detach().to("cpu", torch.bfloat16).unbind(0)):
                    tensors[f"{i}.{p}.{name}"] = tensor.contiguous()
        temporary = path.with_suffix(".partial")
        save_file(tensors, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Take the factors of a saved adapter; `ValueError` if its shapes are another model's."""
        tensors = load_file(path)
        with torch.no_grad():
            for p in PROJECTIONS:
                for name, stacked in (("a", self.a[p]), ("b", self.b[p])):
                    loaded = torch.stack([tensors[f"{i}.{p}.{name}"] for i in range(stacked.shape[0])])
                    if loaded.shape != stacked.shape:
                        raise ValueError(f"{path}: {p}.{name} is {list(loaded.shape)}, expected {list(stacked.shape)}")
                    stacked.copy_(loaded)


def rotary_tables(positions: Tensor, base: float, head_dim: int) -> tuple[Tensor, Tensor]:
    """Float32 cosines and sines `[rows, 1, head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float()[:, None, None] * base**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on halves of `[rows, heads, head_dim]`, computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
