"""Small byte-level tokenizers and chat templates of the families' styles, for tests that need no model."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML_FIXED_SYSTEM = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are the house model<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}"
    "{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{%- set date = date_string or strftime_now('%d %b %Y') %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date + '\n\n' }}"
    "{{- system + '<|eot_id|>' }}"
    "{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}"
    "{% endfor %}"
)
# Says how long the conversation is before it: nothing ahead of the document can be cached.
UNSPLITTABLE = (
    "{{ bos_token }}{{ 'turns: ' ~ messages | length ~ '\n' }}"
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
)
CONTROL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]"],
    "unsplittable": ["<s>", "</s>"],
}
TEMPLATES = {"chatml": CHATML_FIXED_SYSTEM, "llama3": LLAMA3, "mistral": MISTRAL, "unsplittable": UNSPLITTABLE}
BOS_EOS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "unsplittable": ("<s>", "</s>"),
}


def byte_level(control: list[str], *, plain_added: list[str] | None = None) -> Tokenizer:
    """One token a byte, and the control tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    tokenizer.add_tokens(plain_added or [])
    return tokenizer


def save_folder(folder: Path, family: str, *, max_positions: int = 65_536) -> Path:
    """A model folder without weights: tokenizer, template, config."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level(CONTROL[family], plain_added=["<tool_call>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos = BOS_EOS[family]
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": {"content": eos}}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id(eos)]}))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": max_positions}))
    (folder / "chat_template.jinja").write_text(TEMPLATES[family])
    return folder
