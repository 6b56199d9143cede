"""The made weights load, attend where their closed form says, and keep their structure through the layers."""

import math
from pathlib import Path

import pytest
import torch

from engine import default_model
from engine.forward import embed, finish_layer, queries_keys_values, rotation
from engine.model import load_model
from engine.model_folder import resolve_model
from loadtests.shaped_model import (
    LLAMA_8B,
    SMALL,
    Shape,
    ShapedWeights,
    bands,
    group_keys,
    head_keys,
    kernel,
    peaks,
    row_masses,
    write_model,
)
from service.settings import Settings

TINY = Shape(layers=3, hidden=256, heads=4, kv_heads=2, intermediate=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shaped") / "model"
    write_model(made, TINY, tokenizer=default_model.tokenizer_folder(Settings().resolved().cache_dir))
    return made


def test_the_folder_is_a_model_with_the_default_tokeniser(folder: Path) -> None:
    found = resolve_model(str(folder), cache_dir=folder)
    model = load_model(found, dtype=torch.float32)
    assert (model.spec.num_layers, model.spec.head_dim, model.spec.vocabulary) == (3, 128, 49_152)
    assert not model.spec.tied_embeddings
    assert (found / "chat_template.jinja").is_file()


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second, other = (ShapedWeights(TINY, 100, seed=seed).layer(1) for seed in (4, 4, 5))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], other[name])


def test_a_folder_that_holds_something_is_left_alone(folder: Path) -> None:
    with pytest.raises(ValueError, match="is not empty"):
        write_model(folder, TINY, tokenizer=folder)


def test_heads_are_drawn_from_the_whole_spread() -> None:
    keys = head_keys(LLAMA_8B, 0)
    assert keys.shape == (32, 32)
    assert keys.min() < 600 < 14_000 < keys.max()
    assert 4000 < keys.mean() < 6000


def test_the_closed_form_keeps_its_share_at_every_distance() -> None:
    """Summed over all of 131,072 distances, not over the grid that the peaks were found on."""
    tokens, keys = 1 << 17, torch.tensor([1024.0, 8192.0], dtype=torch.float64)
    logits = kernel(LLAMA_8B, bands(LLAMA_8B, keys), torch.arange(tokens, dtype=torch.float64))
    logits *= peaks(LLAMA_8B, keys, tokens=tokens)[:, None]
    mass = logits.exp().sort(dim=1, descending=True).values
    for row, count in zip(mass, keys.long().tolist(), strict=True):
        assert float(row[:count].sum() / row.sum()) == pytest.approx(0.95, abs=0.01)


def test_group_keys_counts_whole_blocks() -> None:
    masses = torch.zeros(2, 2, 10)
    masses[0, :, 3] = 1.0
    masses[1, 0, :2] = masses[1, 1, 4:6] = 0.5
    assert group_keys(masses).tolist() == [128, 512]


def test_rows_attend_nearby_and_a_head_drawn_for_more_keys_needs_more() -> None:
    weights = ShapedWeights(SMALL, 1000)
    ids = torch.randint(1000, (16_384,), generator=torch.Generator().manual_seed(0))
    masses = row_masses(weights, 0, ids)
    assert masses.sum(-1) == pytest.approx(torch.ones(4, 4), abs=1e-4)
    assert bool((masses[..., -32:].sum(-1) > 3 * masses[..., :32].sum(-1)).all())
    drawn = head_keys(SMALL, 0)[0].view(4, 4).mean(1)
    needed = group_keys(masses)
    assert needed[drawn.argmax()] > 3 * needed[drawn.argmin()]


def test_the_constant_component_reaches_the_last_layer(folder: Path) -> None:
    """The mean query and key of layer 2 in the engine's forward pass are what W_q and W_k were made for."""
    model, rows = load_model(folder, dtype=torch.float32), 512
    ids = torch.randint(49_152, (rows,), generator=torch.Generator().manual_seed(1))
    # All rows at position 0, where nothing is turned.
    at = rotation(model, 0, 1)
    still = type(at)(at.cos.expand(rows, -1).contiguous(), at.sin.expand(rows, -1).contiguous())
    with torch.inference_mode():
        hidden = embed(model, ids)
        for layer in model.layers[:-1]:
            _, _, v = queries_keys_values(model, layer, hidden, still)
            attended = v.mean(0, keepdim=True).repeat_interleave(model.spec.group, 1).expand(rows, -1, -1)
            hidden = finish_layer(model, layer, hidden, attended.contiguous())
        q, k, _ = queries_keys_values(model, model.layers[-1], hidden, still)
    mean = q.mean(0).unflatten(0, (model.spec.kv_heads, -1)) * k.mean(0)[:, None]
    wanted = peaks(TINY, head_keys(TINY, 0)[2])
    assert mean.sum(-1).flatten() / math.sqrt(128) == pytest.approx(wanted, rel=0.1)
    assert float(hidden.square().mean()) == pytest.approx(1.0, abs=0.1)
