"""A tiny random model with a tokenizer and a chat template, and engines on it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "engine"))

from tiny_models import SHAPE, save_model

from loadtests.fidelity.variants import Engines

torch.set_num_threads(1)

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_model(folder: Path, **shape: int) -> Any:
    from transformers import LlamaConfig

    model = save_model(folder, LlamaConfig(**(SHAPE | shape), tie_word_embeddings=True))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder, transformers' own model)."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, make_model(folder, num_hidden_layers=2)


@pytest.fixture(scope="session")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one that reads documents behind the crossover in seconds."""
    folder = tmp_path_factory.mktemp("smallest")
    make_model(folder, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    return folder


@pytest.fixture
def engines(tiny: tuple[Path, Any], tmp_path: Path) -> Engines:
    return Engines(tiny[0], tmp_path / "kv", device="cpu", dtype="float32", threads=1)
