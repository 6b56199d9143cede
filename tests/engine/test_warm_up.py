"""Kernels compiled ahead: which lengths are attended to."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.chain import SEGMENT_TOKENS
from engine.cuda import warm_up as module
from engine.cuda.warm_up import warm_up
from engine.model import load_model
from engine.sparse.settings import SparseSettings, default_settings

SETTINGS = replace(default_settings("cuda"), crossover_tokens=SEGMENT_TOKENS)


def test_each_doubled_length_up_to_the_models_context(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEGMENTS", 1)
    model = load_model(llama_folder, dtype=torch.float32, device=torch.device("cpu"))
    assert model.spec.max_positions >= 16_384
    before = model.embedding.clone()
    assert warm_up(model, SETTINGS, most_tokens=20_000) == [8192, 16_384]
    model = replace(model, spec=replace(model.spec, max_positions=10_000))
    assert warm_up(model, SETTINGS) == [8192]
    assert warm_up(model, SparseSettings(policy="dense")) == []
    assert torch.equal(model.embedding, before)
