"""What of the GPU benchmark needs no GPU: models of other shapes, heads for them, and what the plan says of both."""

import statistics

import pytest
import torch

from engine.forward import queries_keys_values, rotation
from engine.spec import spec_from_config
from loadtests.engine_gpu import LLAMA_8B, OTHER_LENGTHS, OTHER_SHAPES, for_shape, predicted_s, random_model
from loadtests.heads import generate, load_profile

SMALL = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2, "vocab_size": 500}


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_random_models_of_other_shapes_compute(name: str) -> None:
    model = random_model({**OTHER_SHAPES[name], **SMALL}, fp8=False, device=torch.device("cpu"))
    spec = model.spec
    assert (model.head is model.embedding) == spec.tied_embeddings
    hidden = torch.ones(3, spec.hidden, dtype=torch.bfloat16)
    q, k, v = queries_keys_values(model, model.layers[0], hidden, rotation(model, 0, 3))
    assert (q.shape, k.shape, v.shape) == ((3, spec.heads, 128), (3, spec.kv_heads, 128), (3, spec.kv_heads, 128))
    assert (model.layers[0].qkv_bias is not None) == (spec.family == "qwen2")


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_heads_fit_the_shape_and_need_as_many_keys(name: str) -> None:
    spec, profile = spec_from_config(OTHER_SHAPES[name]), load_profile("llama8b")
    fitted = for_shape(profile, spec)
    q, k = generate(fitted, 300)
    assert (q.shape, k.shape) == ((300, spec.heads, 128), (spec.kv_heads, 300, 128))
    for layer, of_all in zip(fitted.layers, profile.layers, strict=True):
        wanted = statistics.mean(group.keys or 0 for group in of_all)
        assert statistics.mean(group.keys or 0 for group in layer) == pytest.approx(wanted, rel=0.05)


def test_more_kv_heads_than_the_profile_has_are_refused() -> None:
    spec = spec_from_config({**LLAMA_8B, "num_key_value_heads": 16})
    with pytest.raises(ValueError, match="got 16 KV heads of 128, expected at most 8 of 128"):
        for_shape(load_profile("llama8b"), spec)


def test_the_lengths_and_shapes_are_others_than_the_rates_were_fitted_to() -> None:
    fitted = spec_from_config(LLAMA_8B)
    for config in OTHER_SHAPES.values():
        spec = spec_from_config(config)
        for tokens in OTHER_LENGTHS:
            quick, slow = (predicted_s(spec, tokens, fp8=fp8) for fp8 in (True, False))
            assert 0 < quick < slow < predicted_s(fitted, tokens, fp8=False)
