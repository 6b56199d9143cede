"""`attn_implementation="foreword"`: equal to SDPA where it is dense, near it where it is sparse, SDPA for the rest."""

import inspect
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    StaticCache,
)

import foreword
from engine.errors import ModelError
from engine.model_folder import resolve_model
from foreword import attention

torch.set_num_threads(1)

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None),
}


@pytest.fixture(autouse=True)
def _each_warning_again() -> None:
    attention._warn_once.cache_clear()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, config in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.12)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
    return made


def load(folder: Path, implementation: str = "foreword", **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation, dtype=torch.float32).eval()
    if options:
        foreword.configure_attention(model, **options)
    return model


def random_ids(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 256, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids, **arguments).logits
    return found


# What transformers calls the cache's argument: older versions say `past_key_values`.
CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


def in_chunks(model: Any, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Logits of all rows, prefilled piece by piece into one cache."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        return torch.cat([model(piece, **{CACHE: cache}).logits for piece in ids.split(sizes, 1)], 1)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "foreword.attention"]


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_below_the_crossover_equals_sdpa(
    family: str, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = load(folders[family]), load(folders[family], "sdpa")
    ids = random_ids(2, 700)
    expected = logits(theirs, ids)
    torch.testing.assert_close(logits(ours, ids), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(in_chunks(ours, ids, [300, 17, 1, 382]), expected, atol=1e-4, rtol=1e-4)
    assert warned(caplog) == []
    assert set(foreword.attention_report(ours)["heads"].values()) == {"dense"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sparse_prefill_is_near_and_says_what_it_kept(family: str, folders: dict[str, Path]) -> None:
    ids = random_ids(2, 3000)
    expected = logits(load(folders[family], "sdpa"), ids)[:, -64:]
    # Random weights on random tokens have no structure to find: what is left out is missed in full.
    errors = []
    for target in (0.9, 0.99):
        sparse = load(folders[family], crossover_tokens=512, target=target, dense_share=1.0)
        got = logits(sparse, ids)[:, -64:]
        report = foreword.attention_report(sparse)
        assert report["density"] < 0.999
        assert report["recall"]["mean"] > target - 0.02
        assert len(report["heads"]) == 4
        errors.append(float((got - expected).norm() / expected.norm()))
    assert 1e-5 < errors[1] < 0.2
    assert errors[1] < errors[0] < 0.5


@pytest.mark.slow
def test_a_real_model_says_the_same_with_less_work() -> None:
    folder = resolve_model("default", cache_dir=Path("~/.cache/foreword").expanduser())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(Path(logging.__file__).read_text()).ids[:1700]])
    expected = logits(load(folder, "sdpa"), ids)[0, -512:]
    model = load(folder, crossover_tokens=512, target=0.99)
    got = logits(model, ids)[0, -512:]
    assert foreword.attention_report(model)["density"] < 0.9
    assert float((got.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.93
    divergence = torch.nn.functional.kl_div(
        got.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert float(divergence) < 0.02


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_generate_equals_sdpa_with_its_cache(implementation: str, folders: dict[str, Path]) -> None:
    ids = random_ids(2, 400)
    arguments: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": [],
        "cache_implementation": implementation,
        "disable_compile": True,
    }
    expected = load(folders["llama"], "sdpa").generate(ids, **arguments)
    ours = load(folders["llama"])
    assert torch.equal(ours.generate(ids, **arguments), expected)
    if implementation == "dynamic":
        assert torch.equal(ours.generate(ids, **arguments, prefill_chunk_size=130), expected)


def test_prefilled_cache_is_transformers_own(folders: dict[str, Path]) -> None:
    """Keys and values are all kept, whatever the prefill left out: the first layer's are those of SDPA."""
    ids = random_ids(1, 2000)
    caches = []
    for model in (load(folders["qwen3"], crossover_tokens=0), load(folders["qwen3"], "sdpa")):
        cache = DynamicCache(config=model.config)
        logits(model, ids, **{CACHE: cache})
        caches.append(cache)
    ours, theirs = caches
    assert ours.get_seq_length() == 2000
    torch.testing.assert_close(ours.layers[0].keys, theirs.layers[0].keys)
    torch.testing.assert_close(ours.layers[0].values, theirs.layers[0].values)


def test_whole_segments_as_chunks_change_nothing(folders: dict[str, Path]) -> None:
    ids = random_ids(1, 9000)
    model = load(folders["llama"], crossover_tokens=4096, target=0.9, dense_share=1.0)
    whole = logits(model, ids)[:, -300:]
    report = foreword.attention_report(model)
    assert report["density"] < 0.97
    chunked = in_chunks(model, ids, [4096, 4096, 808])[:, -300:]
    torch.testing.assert_close(chunked, whole, atol=1e-4, rtol=1e-4)
    assert foreword.attention_report(model) == report
    # Chunks that end elsewhere choose for the rows they have.
    odd = in_chunks(model, ids, [5000, 4000])[:, -300:]
    assert 1e-5 < float((odd - whole).norm() / whole.norm()) < 0.6


def test_rows_of_a_batch_are_on_their_own(folders: dict[str, Path]) -> None:
    model = load(folders["mistral"], crossover_tokens=0)
    ids = random_ids(2, 1500)
    both = logits(model, ids)
    for item in range(2):
        torch.testing.assert_close(logits(model, ids[item : item + 1])[0], both[item], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunks", [[900], [256, 644]])
def test_padding_on_the_left_equals_each_text_alone(
    chunks: list[int], folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    ids, there = random_ids(2, 900), torch.ones(2, 900, dtype=torch.int64)
    there[0, :200] = 0
    model = load(folders["llama"], crossover_tokens=256)
    cache, last, parts = DynamicCache(config=model.config), 0, []
    for size in chunks:
        first, last = last, last + size
        positions = (there.cumsum(1) - 1).clamp(min=0)[:, first:last]
        part = logits(
            model, ids[:, first:last], attention_mask=there[:, :last], position_ids=positions, **{CACHE: cache}
        )
        parts.append(part)
    padded = torch.cat(parts, 1)
    assert warned(caplog) == []
    assert not padded.isnan().any()
    if len(chunks) == 1:
        alone = logits(model, ids[:1, 200:])
        torch.testing.assert_close(padded[0, 200:], alone[0], atol=1e-4, rtol=1e-4)
    else:
        theirs = logits(
            load(folders["llama"], "sdpa"), ids, attention_mask=there, position_ids=(there.cumsum(1) - 1).clamp(min=0)
        )
        assert float((padded[0, 200:] - theirs[0, 200:]).norm() / theirs[0, 200:].norm()) < 0.2


def fallback(model: Any, oracle: Any, ids: torch.Tensor, caplog: pytest.LogCaptureFixture, **arguments: Any) -> str:
    """Runs twice; returns the one warning. The result must be SDPA's."""
    expected = logits(oracle, ids, **arguments)
    for _ in range(2):
        torch.testing.assert_close(logits(model, ids, **arguments), expected, atol=1e-5, rtol=1e-5)
    (message,) = warned(caplog)
    return message


def test_padding_on_the_right_falls_back(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    there = torch.ones(2, 600, dtype=torch.int64)
    there[1, 400:] = 0
    model, oracle = load(folders["llama"], crossover_tokens=0), load(folders["llama"], "sdpa")
    assert "a mask beyond causality" in fallback(model, oracle, random_ids(2, 600), caplog, attention_mask=there)


def test_packed_texts_and_whole_masks_fall_back(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    model, oracle = load(folders["llama"], crossover_tokens=0), load(folders["llama"], "sdpa")
    ids = random_ids(1, 600)
    packed = torch.cat((torch.arange(200), torch.arange(400)))[None]
    with torch.no_grad():
        expected = oracle(ids, position_ids=packed, use_cache=False).logits
        got = model(ids, position_ids=packed, use_cache=False).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    whole = torch.ones(1, 1, 600, 600, dtype=torch.bool)  # every row sees everything
    assert "a mask beyond causality" in fallback(model, oracle, ids, caplog, attention_mask=whole)


def test_sliding_windows_fall_back_where_they_bite(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MistralConfig(**SHAPE, sliding_window=256)).save_pretrained(tmp_path)
    model, oracle = load(tmp_path), load(tmp_path, "sdpa")
    short, long = random_ids(1, 200), random_ids(1, 700)
    torch.testing.assert_close(logits(model, short), logits(oracle, short), atol=1e-4, rtol=1e-4)
    assert warned(caplog) == []
    assert "a sliding window" in fallback(model, oracle, long, caplog)
    torch.testing.assert_close(
        in_chunks(model, long, [150, 250, 300]), in_chunks(oracle, long, [150, 250, 300]), atol=1e-4, rtol=1e-4
    )


def test_training_falls_back(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    model, oracle = load(folders["llama"], crossover_tokens=0), load(folders["llama"], "sdpa")
    ids = random_ids(1, 600)
    for one in (model, oracle):
        one.train()
        one(ids, labels=ids).loss.backward()
    ours, theirs = (one.model.layers[0].self_attn.q_proj.weight.grad for one in (model, oracle))
    torch.testing.assert_close(ours, theirs)
    assert ["gradients" in message for message in warned(caplog)] == [True]
    attention._warn_once.cache_clear()
    caplog.clear()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model(ids)
    assert ["dropout" in message for message in warned(caplog)] == [True]


def call(**changes: Any) -> tuple[torch.Tensor, None]:
    """The attention function alone."""
    random = torch.Generator().manual_seed(1)
    head_dim = changes.pop("head_dim", 64)
    q, k, v = (torch.randn(1, heads, 600, head_dim, generator=random) for heads in (6, 2, 2))
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups, module.layer_idx = changes.pop("is_causal", True), 3, 0
    return attention.attention(module, q[:, :, changes.pop("skip", 0) :], k, v, None, **changes)


def test_other_obstacles_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    call(head_dim=32)
    call(is_causal=False)
    call(output_attentions=True)
    call(position_bias=torch.zeros(1, 6, 600, 600))
    with pytest.raises(ValueError, match="softcap"):
        call(softcap=30.0)
    with pytest.raises(ValueError, match="attention sinks"):
        call(s_aux=torch.zeros(6))
    messages = warned(caplog)
    for word in ("heads of 32", "isn't causal", "output_attentions", "position bias", "soft-capped"):
        assert sum(word in message for message in messages) == 1, (word, messages)


def test_a_fallback_in_a_later_chunk_is_causal_from_there() -> None:
    """SDPA's own causality is aligned with the first key; a chunk's rows are the last."""
    bias = torch.zeros(1, 6, 100, 600)
    torch.testing.assert_close(call(skip=500, position_bias=bias)[0], call(skip=500)[0], atol=1e-5, rtol=1e-5)


def test_another_scaling_is_kept() -> None:
    torch.testing.assert_close(call(scaling=0.3)[0], call(scaling=0.3, output_attentions=True)[0], atol=1e-4, rtol=1e-4)


def test_static_cache_larger_than_the_text(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    model, oracle = load(folders["llama"]), load(folders["llama"], "sdpa")
    ids = random_ids(2, 700)
    expected = logits(oracle, ids)
    cache = StaticCache(config=model.config, max_cache_len=1000)
    parts = [logits(model, piece, **{CACHE: cache}) for piece in ids.split([400, 300], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)
    assert warned(caplog) == []


def test_options_are_checked_and_saved_with_the_model(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load(folders["llama"])
    with pytest.raises(ValueError, match="unknown policy 'magic'"):
        foreword.configure_attention(model, policy="magic")
    with pytest.raises(ValueError, match="unknown option depth"):
        foreword.configure_attention(model, depth=3)
    heads = tmp_path / "heads.json"
    heads.write_text('[{"0": ["stream_llm", 64, 1024, 0.9]}]')
    with pytest.raises(ModelError, match="1 layers of 1 heads, the model 2 layers of 6 heads"):
        foreword.configure_attention(model, head_config=str(heads))
    foreword.configure_attention(model, policy="a_shape", a_shape_local=256, crossover_tokens=0)
    model.save_pretrained(tmp_path / "model")
    again = load(tmp_path / "model")
    ids = random_ids(1, 1200)
    torch.testing.assert_close(logits(again, ids), logits(model, ids))
    assert foreword.attention_report(again)["density"] < 0.7


IMPORTS = {
    "light": (
        "import sys, foreword\n"
        "assert not {'torch', 'transformers', 'engine', 'typer', 'rich'} & set(sys.modules), sys.modules.keys()\n"
    ),
    "before": (
        "import foreword\nfrom transformers import AttentionInterface, AttentionMaskInterface\n"
        "assert 'foreword' in AttentionInterface().valid_keys()\n"
        "assert 'foreword' in AttentionMaskInterface().valid_keys()\n"
        "import inspect, transformers.modeling_utils as module\n"
        "assert 'class PreTrainedModel' in inspect.getsource(module)\n"
    ),
    "after": (
        "import transformers.modeling_utils, foreword\nfrom transformers import AttentionInterface\n"
        "assert 'foreword' in AttentionInterface().valid_keys()\n"
    ),
}


@pytest.mark.parametrize("order", IMPORTS)
def test_importing_is_light_and_registers_in_either_order(order: str) -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORTS[order]], capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr


def test_the_log_says_what_is_computed_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        call(head_dim=32)
    assert warned(caplog) == ["attn_implementation='foreword' does not support heads of 32: computed by SDPA instead"]
