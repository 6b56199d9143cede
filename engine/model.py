"""The weights of one model, read from safetensors, with q/k/v and gate/up fused."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError
from engine.rope import frequencies
from engine.spec import ModelSpec, load_spec
from kernels.row_quant import quantise_rows


@dataclass(frozen=True)
class Fp8Matrix:
    """A linear's weights in FP8, one scale an output channel: values * scale."""

    values: torch.Tensor  # [out, in] float8_e4m3fn
    scale: torch.Tensor  # [out, 1] float32


Matrix = torch.Tensor | Fp8Matrix


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; linears are [out, in]."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Matrix  # [(heads + 2 kv_heads) * head_dim, hidden]: q, then k, then v
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    out: Matrix  # [hidden, heads * head_dim]
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Matrix  # [2 * intermediate, hidden]: gate, then up
    gate_up_bias: torch.Tensor | None
    down: Matrix  # [hidden, intermediate]
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class Model:
    """Weights in one dtype on one device; rotary frequencies stay float32."""

    spec: ModelSpec
    embedding: torch.Tensor  # [vocabulary, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocabulary, hidden]; the embedding itself where tied
    inverse_frequencies: torch.Tensor  # [rotary_dim / 2] float32
    rope_factor: float
    interleaved: bool  # the channels of q and k are ordered so that a rotary pair is adjacent
    weights_digest: str
    linear_dtype: str = ""  # of the layers' linears; empty: the model's own

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def load_model(
    folder: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", fp8_linears: bool = False
) -> Model:
    """Load the Hugging Face folder `folder` (one safetensors file or shards).

    fp8_linears: the layers' linears in FP8, quantised as they are read, so that no more than one layer's are ever on
    the device in `dtype`. Raises ModelError: unknown family, a tensor missing, unreadable or of the wrong shape.
    """
    spec, place = load_spec(folder), torch.device(device)
    files = _files(folder)
    reader = _Reader(files, dtype, place)
    # On a CPU adjacent pairs are complex numbers, turned by one multiplication; q·k doesn't see the order of channels.
    reordered = place.type == "cpu" and not spec.adjacent_pairs
    try:
        read = (_layer(reader.take, spec, index, reordered) for index in range(spec.num_layers))
        layers = tuple(fp8_layer(layer) if fp8_linears else layer for layer in read)
        embedding = reader.take("model.embed_tokens.weight", spec.vocabulary, spec.hidden)
        norm = reader.take("model.norm.weight", spec.hidden)
        head = embedding if spec.tied_embeddings else reader.take("lm_head.weight", spec.vocabulary, spec.hidden)
    finally:
        reader.close()
    inverse, factor = frequencies(spec.rope, spec.rotary_dim, place)
    adjacent = reordered or spec.adjacent_pairs
    linears = str(torch.float8_e4m3fn) if fp8_linears else ""
    return Model(spec, embedding, layers, norm, head, inverse, factor, adjacent, _digest(files), linears)


def fp8_layer(layer: LayerWeights) -> LayerWeights:
    """The same layer with its linears in FP8."""

    def quantised(matrix: Matrix) -> Fp8Matrix:
        return matrix if isinstance(matrix, Fp8Matrix) else Fp8Matrix(*quantise_rows(matrix))

    return replace(
        layer,
        qkv=quantised(layer.qkv),
        out=quantised(layer.out),
        gate_up=quantised(layer.gate_up),
        down=quantised(layer.down),
    )


def _layer(take: Callable[..., torch.Tensor], spec: ModelSpec, index: int, reordered: bool) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    rows = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))

    def projection(kind: str, *shape: int) -> torch.Tensor:
        if spec.fused_qkv:
            parts = list(torch.split(take(f"{attention}qkv_proj.{kind}", q + 2 * kv, *shape), [q, kv, kv]))
        else:
            parts = [take(f"{attention}{name}.{kind}", size, *shape) for name, size in rows]
        if reordered:
            parts[:2] = (_interleave(part, spec.head_dim, spec.rotary_dim) for part in parts[:2])
        return torch.cat(parts)

    def gate_up(kind: str, *shape: int) -> torch.Tensor:
        if spec.fused_gate_up:
            return take(f"{mlp}gate_up_proj.{kind}", 2 * spec.intermediate, *shape)
        return torch.cat([take(f"{mlp}{name}_proj.{kind}", spec.intermediate, *shape) for name in ("gate", "up")])

    def head_norm(name: str) -> torch.Tensor | None:
        if not spec.qk_norm:
            return None
        weight = take(f"{attention}{name}.weight", spec.head_dim)
        return _interleave(weight, spec.head_dim, spec.rotary_dim) if reordered else weight

    return LayerWeights(
        input_norm=take(prefix + "input_layernorm.weight", spec.hidden),
        qkv=projection("weight", spec.hidden),
        qkv_bias=projection("bias") if spec.qkv_bias else None,
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        out=take(attention + "o_proj.weight", spec.hidden, q),
        out_bias=take(attention + "o_proj.bias", spec.hidden) if spec.out_bias else None,
        mlp_norm=take(prefix + "post_attention_layernorm.weight", spec.hidden),
        gate_up=gate_up("weight", spec.hidden),
        gate_up_bias=gate_up("bias") if spec.mlp_bias else None,
        down=take(mlp + "down_proj.weight", spec.hidden, spec.intermediate),
        down_bias=take(mlp + "down_proj.bias", spec.hidden) if spec.mlp_bias else None,
    )


def _interleave(weight: torch.Tensor, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Reorder each head's rotated output channels [heads * head_dim, ...] from halves to adjacent pairs."""
    heads = weight.reshape(-1, head_dim, *weight.shape[1:])
    halves = heads[:, :rotary_dim].reshape(len(heads), 2, rotary_dim // 2, *weight.shape[1:])
    return torch.cat((halves.transpose(1, 2).flatten(1, 2), heads[:, rotary_dim:]), 1).reshape(weight.shape)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in names]
    return [folder / "model.safetensors"]


class _Reader:
    """Tensors by name over all shards, checked for shape."""

    def __init__(self, files: list[Path], dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        try:
            self._open = [safe_open(str(file), framework="pt") for file in files]
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read the weights in {files[0].parent}: {error}") from error
        self._where = {name: shard for shard in self._open for name in _names(shard)}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        shard = self._where.get(name)
        if shard is None:
            raise ModelError(f"the weights lack the tensor {name}")
        tensor: torch.Tensor = shard.get_tensor(name)  # type: ignore[no-untyped-call]
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)} from config.json")
        # A copy always: what safetensors gives is a view of the mapped file.
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)

    def close(self) -> None:
        self._where.clear()
        self._open.clear()


def _names(shard: Any) -> list[str]:
    names: list[str] = shard.keys()
    return names


def _digest(files: list[Path]) -> str:
    """blake3 over the files' bytes: part of every KV key, so other weights never match."""
    hasher = blake3(max_threads=blake3.AUTO)
    for file in files:
        hasher.update_mmap(file)
    return hasher.hexdigest()
