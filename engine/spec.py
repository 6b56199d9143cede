"""What one model of the Llama-like family looks like, read from its config.json. Torch-free."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import ModelError

# What the attention kernels take.
HEAD_DIMS = (64, 96, 128, 256)
RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "glm")
_FUSED = ("phi3", "glm")  # gate and up are one tensor in the files


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: the base and how its frequencies are scaled."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_positions: int = 0  # llama3 and yarn: positions of the unscaled model
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole channels
    # yarn and longrope: cos and sin are multiplied by it; None: what the paper says for `factor`
    attention_factor: float | None = None
    # longrope: every channel's own factor. Always the long ones: those of transformers depend on the length of the
    # whole text, and KV must not depend on what comes later.
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and options of one decoder; every family is a choice of these."""

    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int  # channels of a head that are rotated, its first ones
    intermediate: int
    vocabulary: int
    norm_eps: float
    rope: RopeSpec
    max_positions: int
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm over each head of q and k, before the rotation
    adjacent_pairs: bool  # a rotary pair is two adjacent channels, not two halves' equal ones
    fused_qkv: bool  # in the weights' files
    fused_gate_up: bool
    tied_embeddings: bool
    eos_ids: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def linear_parameters(self) -> int:
        """Weights of all layers' linears; a token costs twice as many floating-point operations."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """K and V of one layer, in bytes."""
        return 2 * self.kv_heads * self.head_dim * itemsize


def load_spec(folder: Path) -> ModelSpec:
    """The spec of the model in `folder`. Raises ModelError: unknown family, unsupported option, damaged config."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        generation = folder / "generation_config.json"
        eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id") if generation.is_file() else None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the model's configuration in {folder}: {error}") from error
    return spec_from_config(config, eos_ids=eos)


def spec_from_config(config: dict[str, Any], *, eos_ids: int | list[int] | None = None) -> ModelSpec:
    """The spec of a transformers config as a dictionary. `eos_ids` (of generation_config.json) wins over its own."""
    family = config.get("model_type")
    if family not in FAMILIES:
        modules = ", ".join(map(str, config.get("architectures") or ())) or "no architecture"
        raise ModelError(f"unknown model family {family!r} ({modules}); expected one of {', '.join(FAMILIES)}")
    _refuse_unsupported(config, family)
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        spec = ModelSpec(
            family=family,
            num_layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            rotary_dim=int(head_dim * _rotary_share(config, family)),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config),
            max_positions=int(config["max_position_embeddings"]),
            qkv_bias=family == "qwen2" or (family != "phi3" and bool(config.get("attention_bias", family == "glm"))),
            out_bias=family in ("llama", "qwen3") and bool(config.get("attention_bias")),
            mlp_bias=family == "llama" and bool(config.get("mlp_bias")),
            qk_norm=family == "qwen3",
            adjacent_pairs=family == "glm",
            fused_qkv=family == "phi3",
            fused_gate_up=family in _FUSED,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_ids=_ids(eos_ids if eos_ids is not None else config.get("eos_token_id")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json of a {family} model lacks or mangles a field: {error!r}") from error
    if spec.heads % spec.kv_heads:
        raise ModelError(f"{spec.heads} query heads do not divide into {spec.kv_heads} KV heads")
    if spec.head_dim not in HEAD_DIMS:
        raise ModelError(f"head_dim {spec.head_dim} is not supported; expected one of {HEAD_DIMS}")
    if spec.rotary_dim % 2 or not 0 < spec.rotary_dim <= spec.head_dim:
        raise ModelError(f"{spec.rotary_dim} rotated channels of {spec.head_dim}: expected an even number of them")
    factors = len(spec.rope.long_factors)
    if spec.rope.kind == "longrope" and factors != spec.rotary_dim // 2:
        raise ModelError(f"longrope has {factors} long factors, expected {spec.rotary_dim // 2}")
    return spec


def _refuse_unsupported(config: dict[str, Any], family: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"activation {activation!r} is not supported; expected silu")
    sliding = "sliding_attention" in (config.get("layer_types") or ())
    if family in ("mistral", "phi3"):
        window, positions = config.get("sliding_window"), config.get("max_position_embeddings", 0)
        sliding = sliding or (window is not None and window < positions)
    elif config.get("use_sliding_window"):
        sliding = True
    if sliding:
        raise ModelError(f"this {family} model uses sliding-window attention, which is not supported")
    if config.get("quantization_config"):
        raise ModelError("quantised weights are not supported; expected a folder with plain safetensors")


def _scaling(config: dict[str, Any]) -> dict[str, Any]:
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _rotary_share(config: dict[str, Any], family: str) -> float:
    share = _scaling(config).get("partial_rotary_factor") or config.get("partial_rotary_factor")
    share = float(share or (0.5 if family == "glm" else 1.0))
    if share != 1.0 and family not in _FUSED:
        raise ModelError(f"partial rotary embedding is not supported for {family}")
    return share


def _rope(config: dict[str, Any]) -> RopeSpec:
    scaling = _scaling(config)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if kind == "default":
        return RopeSpec(theta)
    if config.get("model_type") == "phi3" and kind in ("su", "yarn", "longrope"):
        return _longrope(config, scaling, theta)
    kinds: dict[str, RopeKind] = {"linear": "linear", "llama3": "llama3", "yarn": "yarn"}
    if kind not in kinds:
        raise ModelError(f"RoPE scaling {kind!r} is not supported; expected default, linear, llama3 or yarn")
    original = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
    if scaling.get("mscale") or scaling.get("mscale_all_dim"):
        raise ModelError("yarn with mscale is not supported")
    return RopeSpec(
        theta=theta,
        kind=kinds[kind],
        factor=float(scaling["factor"]),
        original_positions=int(original),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=scaling.get("attention_factor"),
    )


def _longrope(config: dict[str, Any], scaling: dict[str, Any], theta: float) -> RopeSpec:
    original = int(
        scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or 4096
    )
    return RopeSpec(
        theta=theta,
        kind="longrope",
        factor=float(scaling.get("factor") or config["max_position_embeddings"] / original),
        original_positions=original,
        attention_factor=scaling.get("attention_factor"),
        long_factors=tuple(float(factor) for factor in scaling["long_factor"]),
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
