"""Which tensors a model's files hold, against those that the forward pass computes with. Torch-free.

A module that the files have and the forward pass doesn't would be left out without a word, and answers be wrong.
"""

import json
from pathlib import Path

from engine.errors import ModelError
from engine.spec import ModelSpec

# In old checkpoints; the frequencies are computed from the configuration.
_COMPUTED = "rotary_emb.inv_freq"
_SHOWN = 3


def check_names(folder: Path, spec: ModelSpec) -> None:
    """Raises ModelError where the weights in `folder` hold tensors of modules that are not computed."""
    names = {name for name in _stored(folder) if not name.endswith(_COMPUTED)}
    unknown = sorted(names - _computed_with(spec), key=lambda name: (name.count("."), name))
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise ModelError(
            f"the forward pass of {spec.family} models does not know {', '.join(unknown[:_SHOWN])}{more}, "
            f"which the weights in {folder} hold"
        )


def _computed_with(spec: ModelSpec) -> set[str]:
    attention = (
        {"qkv_proj": spec.qkv_bias} if spec.fused_qkv else dict.fromkeys(("q_proj", "k_proj", "v_proj"), spec.qkv_bias)
    )
    attention["o_proj"] = spec.out_bias
    gates = ("gate_up_proj",) if spec.fused_gate_up else ("gate_proj", "up_proj")
    linears = {f"self_attn.{name}": bias for name, bias in attention.items()}
    linears |= {f"mlp.{name}": spec.mlp_bias for name in (*gates, "down_proj")}
    of_layer = {f"{name}.weight" for name in (*linears, "input_layernorm", "post_attention_layernorm")}
    of_layer |= {f"{name}.bias" for name, bias in linears.items() if bias}
    if spec.qk_norm:
        of_layer |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    outside = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    return outside | {f"model.layers.{layer}.{name}" for layer in range(spec.num_layers) for name in of_layer}


def _stored(folder: Path) -> set[str]:
    """Names in the index of the shards, or in the header of the one file; none where neither is there."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.is_file():
            return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        if not single.is_file():
            return set()
        with single.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
        return set(json.loads(header)) - {"__metadata__"}
    except (OSError, ValueError, KeyError, MemoryError, OverflowError) as error:
        raise ModelError(f"cannot read the names of the weights in {folder}: {error!r}") from error
