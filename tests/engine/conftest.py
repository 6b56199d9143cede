"""A tiny model's folder, and engines on a store under tmp_path."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SHAPE, OpenEngine, save_model

from engine.engine import LocalEngine, open_engine
from engine.interfaces import KVLayout
from engine.kv_store import DiskLimits, LocalKVStore

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama")
    save_model(folder, LlamaConfig(**SHAPE, tie_word_embeddings=True))
    return folder


@pytest.fixture(scope="session")
def light_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention over many tokens at a third of `llama_folder`'s cost: two heads, neither shares its keys."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("light")
    save_model(folder, LlamaConfig(**SHAPE | {"num_attention_heads": 2}, tie_word_embeddings=True))
    return folder


def _builder(folder: Path) -> OpenEngine:
    def build(model: Path, name: str = "kv", **options: Any) -> LocalEngine:
        def open_store(layout: KVLayout) -> LocalKVStore:
            # One layer a file, so that every layer boundary can be a resume point.
            return LocalKVStore(folder / name, replace(layout, layers_per_group=1), DiskLimits(cap_bytes=1 << 30))

        options.setdefault("dtype", "float32")
        options.setdefault("resume_dir", folder / f"{name}-resume")
        return open_engine(model, open_store, **options)

    return build


@pytest.fixture
def engine_on(tmp_path: Path) -> OpenEngine:
    """engine_on(model folder, name="kv", **open_engine's arguments): one KV folder a name."""
    return _builder(tmp_path)


@pytest.fixture(scope="module")
def module_engine_on(tmp_path_factory: pytest.TempPathFactory) -> OpenEngine:
    return _builder(tmp_path_factory.mktemp("engines"))
