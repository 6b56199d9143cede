"""Head profiles: heads whose pattern is known get it, and the file that comes out is one that the engine takes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import OpenEngine, prefill_request, random_tokens, run

from engine.errors import ContextTooLong, InvalidRequest
from engine.model import Model, load_model
from engine.sparse.head_config import NAMES, HeadPattern, load_head_config
from engine.sparse.profile import _Profile, candidates, profile_heads
from engine.sparse.settings import SparseSettings, chosen_settings
from engine.sparse.task import SegmentTask
from foreword.profile import as_head_config

BUDGET = 1024
TOKENS = 6000


@pytest.fixture(scope="module")
def model(llama_folder: Path) -> Model:
    return load_model(llama_folder, dtype=torch.float32)


def planted() -> SegmentTask:
    """Six query heads over three KV heads: two look back a little; two look, row by row, at one of a few columns; two
    at one of a few blocks that each row block has for itself."""
    random = torch.Generator().manual_seed(3)
    start, rows, wide, key_block, row_block = 4096, 1024, 64, 64, 256
    end = start + rows
    q, k = torch.zeros(rows, 6, wide), torch.zeros(3, end, wide)
    angle = torch.arange(end) * 0.0006
    k[0, :, 0], k[0, :, 1] = 30 * angle.cos(), 30 * angle.sin()
    q[:, :2, 0], q[:, :2, 1] = 30 * angle[start:, None].cos(), 30 * angle[start:, None].sin()

    def picked(codes: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        """Queries [rows, 2, wide] that each like one of their row's choices [rows, count] of codes."""
        which = torch.randint(choices.shape[1], (len(choices), 2), generator=random)
        return 2 * codes[choices.gather(1, which)]

    codes = torch.randn(end // key_block, wide, generator=random)
    columns = torch.randperm(start // key_block, generator=random)[:11]
    k[1] = torch.randn(end, wide, generator=random)
    k[1, columns * key_block + 7] = codes[columns]
    q[:, 2:4] = picked(codes, columns.expand(rows, -1))
    k[2] = codes.repeat_interleave(key_block, 0)
    of_block = torch.randperm(start // key_block, generator=random)[: rows // row_block * 6].view(-1, 6)
    q[:, 4:] = picked(codes, of_block.repeat_interleave(row_block, 0))
    v = torch.randn(3, end, wide, generator=random)
    return SegmentTask(layer=0, start=start, q=q, k=k, v=v, out=torch.empty_like(q), seed=1)


def test_planted_heads_get_their_pattern(model: Model) -> None:
    settings = SparseSettings("vertical_slash")
    patterns = candidates(BUDGET, settings.key_block)
    profile = _Profile(model, random_tokens(64), settings, patterns, 4096, seed=0)
    recalls = profile._recalls(planted())
    assert recalls.shape == (len(patterns), 6)
    best = [head.pattern.pattern for head in profile._best(recalls)]
    assert best == ["a_shape", "a_shape", "vertical_slash", "vertical_slash", "block_sparse", "block_sparse"], recalls


def test_every_candidate_has_the_same_budget() -> None:
    for pattern in candidates(BUDGET, 64):
        kept = pattern.first * 64 if pattern.pattern == "block_sparse" else pattern.first + pattern.second
        assert kept == BUDGET, pattern


def test_a_profile_is_a_head_config_that_the_engine_takes(
    model: Model, llama_folder: Path, engine_on: OpenEngine, tmp_path: Path
) -> None:
    seen: list[float] = []
    layers = profile_heads(model, random_tokens(TOKENS), budget=BUDGET, progress=seen.append)
    assert (len(layers), {len(layer) for layer in layers}) == (3, {6})
    assert all(0.1 < head.recall <= 1.0001 for layer in layers for head in layer)
    assert seen == pytest.approx([1 / 3, 2 / 3, 1])

    file = tmp_path / "heads.json"
    file.write_text(as_head_config(layers))
    assert set(json.loads(file.read_text())[0]) == set("012345")
    config = load_head_config(file)
    assert [[head.pattern for head in layer] for layer in layers] == [list(layer) for layer in config.layers]
    settings = chosen_settings(head_config=file, crossover_tokens=4096)
    engine = engine_on(llama_folder, sparse=settings)
    result = run(engine.start_prefill(prefill_request(random_tokens(TOKENS)))).result
    assert result.density < 0.95
    # The recall that the profile promised is the one that the prefill's guard measures.
    promised = np.mean([head.recall for layer in layers for head in layer])
    assert result.recall is not None
    assert result.recall.mean == pytest.approx(promised, abs=0.03)


def test_hidden_states_are_those_of_a_dense_prefill(model: Model, llama_folder: Path, engine_on: OpenEngine) -> None:
    """The last layer's input decides its patterns: it must be the model's own."""
    tokens = random_tokens(TOKENS)
    profile = _Profile(model, tokens, SparseSettings("vertical_slash"), candidates(BUDGET, 64), 4096, seed=0)
    with torch.inference_mode():
        profile.run(lambda fraction: None)
        got = profile._hidden[-1] * torch.rsqrt(profile._hidden[-1].square().mean() + model.spec.norm_eps)
        logits = (got * model.norm) @ model.head.T
    exact = run(engine_on(llama_folder).start_prefill(prefill_request(tokens, fidelity="exact")))
    torch.testing.assert_close(logits, exact.last_logits, atol=1e-3, rtol=1e-3)


def test_bad_input_is_named(model: Model) -> None:
    with pytest.raises(InvalidRequest, match="the text has 1000 tokens, a budget of 1024 needs at least 4352"):
        profile_heads(model, random_tokens(1000), budget=BUDGET)
    with pytest.raises(InvalidRequest, match="got 100 tokens, expected at least 512"):
        profile_heads(model, random_tokens(TOKENS), budget=100)
    with pytest.raises(ContextTooLong):
        profile_heads(model, random_tokens(40_000), budget=BUDGET)


def test_choices_of_a_policy(tmp_path: Path) -> None:
    assert chosen_settings() == SparseSettings()
    assert chosen_settings("a_shape").policy == "a_shape"
    file = tmp_path / "heads.json"
    file.write_text(json.dumps([{"0": [NAMES["a_shape"], 64, 1024, 0.9]}]))
    chosen = chosen_settings(head_config=file)
    assert chosen.head_config is not None
    assert chosen.head_config.layers == ((HeadPattern("a_shape", 64, 1024),),)
    with pytest.raises(ValueError, match="got policy 'a_shape' beside"):
        chosen_settings("a_shape", file)
    with pytest.raises(ValueError, match="unknown policy 'tri_shape'"):
        chosen_settings("tri_shape")
