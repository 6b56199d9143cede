"""Our forward pass against transformers' on tiny random models of each family, saved and loaded as real folders."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SHAPE, OpenEngine, prefill_request, random_tokens, run, save_model
from transformers import GlmConfig, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config

from engine.errors import ModelError
from engine.interfaces import AnswerRequest, SamplingParams
from engine.model import load_model
from engine.model_folder import resolve_model
from engine.spec import load_spec, spec_from_config

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
PHI3 = {**SHAPE, "hidden_size": 384}  # its heads are hidden / heads wide
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 24,
    "long_factor": [1.0 + 0.25 * channel for channel in range(24)],
}
NO_WINDOW = {"sliding_window": None}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama_tied_biases": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama3_rope": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "llama_linear_rope": lambda: LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    ),
    "llama_yarn": lambda: LlamaConfig(**SHAPE, rope_parameters=YARN_ROPE),
    "mistral": lambda: MistralConfig(**SHAPE, **NO_WINDOW),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "yi": lambda: LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}, rope_theta=5e6),
    "phi3": lambda: Phi3Config(**PHI3),
    "phi3_longrope": lambda: Phi3Config(
        **PHI3, original_max_position_embeddings=512, rope_parameters={**LONGROPE, "partial_rotary_factor": 0.75}
    ),
    "glm": lambda: GlmConfig(**{**SHAPE, "num_attention_heads": 16, "num_key_value_heads": 1}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_answer_equal_transformers(family: str, tmp_path: Path, engine_on: OpenEngine) -> None:
    oracle = save_model(tmp_path / "model", FAMILIES[family](), shard="100KB" if family == "qwen3" else "1GB")
    engine = engine_on(tmp_path / "model")
    tokens = random_tokens(700)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        expected = oracle(ids).logits[0, -1]
    got = run(engine.start_prefill(prefill_request(tokens))).last_logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)

    # The same tokens as a prefix from the store and a question behind it: the next tokens are transformers' own.
    sampling = SamplingParams(max_tokens=5)
    run(engine.start_prefill(prefill_request(tokens[:600], owner="prefix")))
    answer = engine.start_answer(AnswerRequest(tokens[:600], tokens[600:], b"salt", sampling))
    got_tokens = [answer.step().token_ids for _ in range(5)]
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        greedy = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, eos_token_id=[]
        )
    assert [token for (token,) in got_tokens] == greedy[0, 700:].tolist()


def test_sharded_weights_were_sharded(tmp_path: Path) -> None:
    save_model(tmp_path, FAMILIES["qwen3"](), shard="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert load_model(tmp_path, dtype=torch.float32).spec.qk_norm


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "unknown model family 'gpt2'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic'"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window"),
        ({"num_key_value_heads": 4}, "do not divide"),
        ({"hidden_size": None}, "lacks or mangles"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"head_dim": 48}, "head_dim"),
    ],
)
def test_unsupported_models_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config({**SHAPE, "model_type": "llama", **change})


def test_mistral_with_a_window_is_refused() -> None:
    with pytest.raises(ModelError, match="sliding-window"):
        spec_from_config({**SHAPE, "model_type": "mistral", "sliding_window": 4096})


def test_generation_config_decides_the_end_tokens(tmp_path: Path) -> None:
    save_model(tmp_path, LlamaConfig(**SHAPE))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert load_spec(tmp_path).eos_ids == (2, 7)


def test_damaged_folders_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="configuration"):
        load_spec(tmp_path)
    save_model(tmp_path, LlamaConfig(**SHAPE))
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"intermediate_size": 160', '"intermediate_size": 192'))
    with pytest.raises(ModelError, match=r"gate_proj.weight has shape \[160, 96\], expected \[192, 96\]"):
        load_model(tmp_path, dtype=torch.float32)
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(ModelError, match=r"lack the tensor model\.layers\.3"):
        load_model(tmp_path, dtype=torch.float32)
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ModelError, match="cannot read the weights"):
        load_model(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_own_weights_are_known(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, FAMILIES[family](), shard="100KB" if family == "qwen3" else "1GB")
    assert resolve_model(str(tmp_path), cache_dir=tmp_path) == tmp_path.resolve()


def test_modules_that_are_not_computed_are_refused_by_name(tmp_path: Path) -> None:
    save_model(tmp_path, LlamaConfig(**SHAPE))
    weights = load_file(tmp_path / "model.safetensors")
    extra = {"self_attn.q_proj.bias": weights["model.norm.weight"], "mlp.experts.0.up_proj.weight": torch.ones(2)}
    weights |= {f"model.layers.1.{name}": tensor.clone() for name, tensor in extra.items()}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)  # of old checkpoints: computed anew
    save_file(weights, tmp_path / "model.safetensors")
    message = (
        r"know model\.layers\.1\.self_attn\.q_proj\.bias, model\.layers\.1\.mlp\.experts\.0\.up_proj\.weight, which"
    )
    with pytest.raises(ModelError, match=message):
        resolve_model(str(tmp_path), cache_dir=tmp_path)


def test_an_unknown_family_is_named_with_its_modules() -> None:
    config = {**SHAPE, "model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    with pytest.raises(ModelError, match=r"'mamba' \(MambaForCausalLM\); expected one of llama"):
        spec_from_config(config)
