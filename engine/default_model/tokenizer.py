"""The default model's tokenizer, configuration and chat template, straight from the GGUF metadata. Torch-free.

The GGUF's tokenizer is mended: digits are split one by one (as the model was trained), and the control tokens are
set: `<|im_start|>` begins, `<|im_end|>` ends and pads.
"""

import json
from pathlib import Path
from typing import Any

from engine.default_model.gguf_source import field, open_gguf, strings

ROPE_THETA = 8_000_000.0
MAX_POSITIONS = 524_288
CONTROL_TOKEN = 3  # GGUF's token type of control tokens


def write_tokenizer_files(gguf: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json, generation_config.json."""
    reader = open_gguf(gguf)
    tokens = strings(reader, "tokenizer.ggml.tokens")
    types = field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer = _tokenizer(tokens, strings(reader, "tokenizer.ggml.merges"), control)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = str(field(reader, "tokenizer.chat_template"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokens, control, template))
    _write_json(folder / "config.json", _config(reader, len(tokens)))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    )


def _tokenizer(tokens: list[str], merges: list[str], control: list[str]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(tokens: list[str], control: list[str], template: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": tokens[0],
        "additional_special_tokens": [token for token in control if token not in ("<|im_start|>", "<|im_end|>")],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": template,
    }


def _config(reader: Any, vocabulary: int) -> dict[str, Any]:
    heads = int(field(reader, "llama.attention.head_count"))
    hidden = int(field(reader, "llama.embedding_length"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": int(field(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(field(reader, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(field(reader, "llama.attention.head_count_kv")),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
