"""Policies compared on a model's own queries and keys: the figures are those of plain attention."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_models import random_tokens

from engine.model import Model, load_model
from engine.sparse.settings import SparseSettings
from loadtests.fidelity.compare import DENSE, Contender, Point, compare, contenders, main, relative_error, summarise
from loadtests.fidelity.rivals import RIVALS, _heaviest_lines, available

TOKENS = 4700
BASE = SparseSettings(crossover_tokens=4096, dense_share=1.0)


@pytest.fixture(scope="module")
def model(smallest: Path) -> Model:
    return load_model(smallest, dtype=torch.float32)


def run(model: Model, *found: Contender) -> dict[tuple[str, str], Point]:
    points = compare(model, random_tokens(TOKENS), found, {}, digest="", layers=[1])
    return {(point.policy, point.budget): point for point in points}


def test_more_budget_is_more_density_more_recall_and_less_error(model: Model) -> None:
    found = run(model, *contenders(BASE))
    assert found[DENSE, ""].error == 0
    for policy in ("a_shape", "block_sparse", "adaptive"):
        mine = [point for (name, _), point in found.items() if name == policy]
        assert len(mine) >= 3
        for less, more in pairwise(mine):
            assert less.density <= more.density <= 1
            assert less.recall <= more.recall + 1e-6
            assert less.error >= more.error - 1e-6
    assert found["a_shape", "1024 local"].error > 0.01


def test_recall_and_error_are_those_of_a_plain_computation(model: Model) -> None:
    local = 1024
    shape = Contender("a_shape", "", replace(BASE, policy="a_shape", a_shape_sink=64, a_shape_local=local))
    found = run(model, shape)["a_shape", ""]
    q, k, v = layer_one(model)
    scores = torch.einsum("qhd,hkd->hqk", q.double(), k.repeat_interleave(q.shape[1] // len(k), 0).double())
    scores *= q.shape[2] ** -0.5
    row, key = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    causal = key <= row
    # By blocks: a row block of 256 sees the sink and the local blocks that end with its own last row.
    ends = ((row // BASE.row_block + 1) * BASE.row_block).clamp(max=TOKENS)
    last = -(-ends // BASE.key_block)
    block = key // BASE.key_block
    kept = causal & ((row < 4096) | (block < 1) | (block >= last - local // BASE.key_block))
    shares = scores.masked_fill(~causal, float("-inf")).softmax(-1)
    assert found.recall == pytest.approx(float((shares * kept).sum(-1).mean()), abs=1e-4)
    values = v.repeat_interleave(q.shape[1] // len(k), 0).double()
    sparse = scores.masked_fill(~kept, float("-inf")).softmax(-1) @ values
    dense = shares @ values
    assert found.error == pytest.approx(float((sparse - dense).norm() / dense.norm()), rel=1e-3)


def layer_one(model: Model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from engine.chain import segment_chain
    from kernels.dense_attention import dense_attention
    from loadtests.fidelity.layers import walk

    tokens = random_tokens(TOKENS)
    with torch.inference_mode():
        for qkv in walk(model, tokens, segment_chain(tokens, salt=b"", digest=""), num_layers=2):
            if qkv.layer == 1:
                return qkv.q, qkv.k, qkv.v
            qkv.out.copy_(dense_attention(qkv.q, qkv.k, qkv.v)[0])
    raise AssertionError("the model has two layers")


def test_summary_adds_seconds_and_compares_layer_by_layer() -> None:
    points = [
        Point(DENSE, "", 0, 4.0, 0.0, 1.0, 1.0),
        Point(DENSE, "", 1, 2.0, 0.0, 1.0, 1.0),
        Point("adaptive", "a", 0, 1.0, 0.2, 0.9, 0.3),
        Point("adaptive", "a", 1, 2.0, 0.4, 1.0, 0.5),
        Point("flexprefill", "default", 1, 1.0, 0.3, None, None),
    ]
    _, adaptive, foreign = summarise(points)
    assert adaptive["speedup"] == 2.0
    assert adaptive["error"] == pytest.approx(0.3)
    assert adaptive["density"] == pytest.approx(0.4)
    assert (foreign["speedup"], foreign["recall"]) == (2.0, None)


def test_foreign_kernels_that_are_not_there_say_why() -> None:
    found, missing = available(torch.device("cpu"))
    assert found == {}
    assert missing == dict.fromkeys(RIVALS, "needs a GPU")


def test_lines_are_those_with_the_most_mass() -> None:
    q, k = torch.zeros(1, 1, 9000, 8), torch.zeros(1, 1, 9000, 8)
    q[..., 0] = 8
    k[0, 0, 4321, 0] = 8
    vertical, slash = _heaviest_lines(q, k)
    assert 4321 in vertical[0, 0]
    assert set(range(30)) <= set(vertical[0, 0].tolist())
    assert set(range(100)) <= set(slash[0, 0].tolist())
    assert vertical.shape == (1, 1, 1000)
    assert slash.shape == (1, 1, 6096)


def test_relative_error_is_the_norms_ratio() -> None:
    dense = torch.randn(5000, 2, 8)
    assert relative_error(dense * 1.1, dense) == pytest.approx(0.1, rel=1e-4)


def test_command_writes_its_figures(smallest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(smallest), "--device", "cpu", "--threads", "1", "--lengths", "9216", "--layers", "1"]
    assert main([*options, "--results", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "compare.json").read_text())
    assert report["lengths"][0]["tokens"] == 9216
    assert {point["layer"] for point in report["lengths"][0]["points"]} == {1}
    assert (tmp_path / "compare.png").stat().st_size > 0
    entries = json.loads((tmp_path / "summary.json").read_text())
    assert [entry["name"] for entry in entries] == ["attention_speedup_probe_9k"]
    shown = capsys.readouterr().out
    assert "passed over: minference: needs a GPU" in shown
    assert "target 0.95" in shown
