"""Tiny random models as real folders, and short ways to prefill and to look at stored KV."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.chain import TokenIds
from engine.engine import LocalEngine
from engine.interfaces import PrefillRequest
from engine.prefill import LayerMajorPrefill

VOCABULARY = 256
OpenEngine = Callable[..., LocalEngine]

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def byte_tokenizer() -> Tokenizer:
    """One token a byte: ids 0–255 are the byte-level alphabet in its order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_model(folder: Path, config: Any, *, seed: int = 0, shard: str = "1GB") -> Any:
    """A random model of `config` as a Hugging Face folder; returns transformers' own, float32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than the default, so that attention is far from uniform; norms away from 1, biases from 0.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.12)
    model.save_pretrained(folder, max_shard_size=shard)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def random_tokens(count: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).astype(np.uint32)


def prefill_request(tokens: TokenIds, **fields: Any) -> PrefillRequest:
    return PrefillRequest(tokens=tokens, salt=b"salt", **{"owner": "job", "holder": "document"} | fields)


def run(prefill: LayerMajorPrefill) -> LayerMajorPrefill:
    while prefill.step():
        pass
    return prefill


def stored_kv(engine: LocalEngine, tokens: TokenIds, fidelity: Any = "default") -> list[list[bytes]]:
    """Every stored (layer, segment) of a prefix, as bytes."""
    reader = engine.store.open_reader(engine.chain(tokens, b"salt", fidelity))
    try:
        return [[bytes(part) for part in reader.read_layer(layer)] for layer in range(engine.store.layout.num_layers)]
    finally:
        reader.close()
