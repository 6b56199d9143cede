"""The default model's weights: dequantised from GGUF, the adapter merged in float32, stored as bfloat16."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from engine.default_model.gguf_source import field, open_gguf
from engine.errors import ModelError

ADAPTER = Path(__file__).with_name("adapter.safetensors")
ADAPTER_SCALE = 2.0

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_weights(gguf: Path, folder: Path) -> None:
    """Write model.safetensors (bfloat16, Hugging Face names) into `folder`."""
    from gguf.quants import dequantize

    reader = open_gguf(gguf)
    heads = {
        "attn_q": int(field(reader, "llama.attention.head_count")),
        "attn_k": int(field(reader, "llama.attention.head_count_kv")),
    }
    adapter = load_file(str(ADAPTER))
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if parts[0] == "blk" and parts[2] in heads:
            values = _undo_permutation(values, heads[parts[2]])
        weight = torch.from_numpy(np.array(values))  # a copy: the mapped file is read-only
        if parts[0] == "blk":
            weight = _with_adapter(weight, adapter, int(parts[1]), parts[2])
        weights[_name(parts)] = weight.to(torch.bfloat16)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _undo_permutation(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """llama.cpp interleaves the two rotary halves of each head; Hugging Face keeps them apart. [out, in]."""
    out_features, in_features = weight.shape
    pairs = weight.reshape(heads, out_features // heads // 2, 2, in_features)
    return pairs.swapaxes(1, 2).reshape(out_features, in_features)


def _with_adapter(weight: torch.Tensor, adapter: dict[str, torch.Tensor], layer: int, part: str) -> torch.Tensor:
    name = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o"}.get(part)
    if name is None:
        return weight
    down, up = adapter[f"{layer}.{name}.a"].float(), adapter[f"{layer}.{name}.b"].float()
    return weight + ADAPTER_SCALE * (up @ down)


def _name(parts: list[str]) -> str:
    if parts == ["token_embd", "weight"]:
        return "model.embed_tokens.weight"
    if parts == ["output_norm", "weight"]:
        return "model.norm.weight"
    if parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    raise ModelError(f"unexpected tensor {'.'.join(parts)} in the GGUF file")
