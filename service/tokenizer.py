"""A model folder's tokenizer through `tokenizers` alone: no torch, no transformers."""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from blake3 import blake3

from engine.chain import TokenIds
from engine.errors import ModelError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """A run of prompt text. Only `trusted` text (a chat template's own) may become control tokens."""

    text: str
    trusted: bool


class Tokenizer:
    """Text to token ids, with control tokens only where a template wrote them.

    Every added token that isn't white space counts as a control token, whatever the file says about `special`:
    Qwen's `<tool_call>` is as much an instruction to the model as `<|im_end|>`.
    """

    def __init__(self, definition: str, *, special_tokens: dict[str, str], eos_ids: frozenset[int]) -> None:
        """`definition` is the text of tokenizer.json; `special_tokens` maps bos_token, eos_token, … to their text."""
        data: dict[str, Any] = json.loads(definition)
        control = [token for token in data.get("added_tokens", []) if token["content"].strip()]
        for token in control:
            # `encode_special_tokens` below turns exactly the special ones into ordinary text.
            token["special"] = True
        data["truncation"] = data["padding"] = None
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
        self._tokenizer.encode_special_tokens = True
        self.control_ids: dict[str, int] = {token["content"]: token["id"] for token in control}
        self._control_id_set = frozenset(self.control_ids.values())
        self._control = _control_pattern(control)
        self.special_tokens = special_tokens
        self.eos_ids = eos_ids
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.digest = blake3(definition.encode()).hexdigest()

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json and its companions. Raises ModelError when it is missing or damaged."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json; a folder saved by a fast tokenizer is expected")
        config = read_json(folder / "tokenizer_config.json")
        special = _special_tokens(config, read_json(folder / "special_tokens_map.json"))
        try:
            tokenizer = cls(path.read_text(encoding="utf-8"), special_tokens=special, eos_ids=frozenset())
        except Exception as error:  # `tokenizers` raises plain Exception
            raise ModelError(f"{path} can't be read as a tokenizer: {error}") from error
        tokenizer.eos_ids = tokenizer._find_eos_ids(folder)
        return tokenizer

    def encode(self, text: str) -> TokenIds:
        """Ids of ordinary text, [tokens] uint32. Never holds a control token, whatever the text spells."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not self._control_id_set.isdisjoint(ids):
            ids = self._encode_apart(text)
        return np.asarray(ids, dtype=np.uint32)

    def encode_pieces(self, pieces: Sequence[Piece]) -> TokenIds:
        """Ids of a prompt: control tokens where trusted text names them, everything between as ordinary text.

        Neighbouring text is tokenized in one run across pieces, as the model saw it in training.
        """
        ids: list[TokenIds] = []
        run: list[str] = []

        def flush() -> None:
            if text := "".join(run):
                ids.append(self.encode(text))
            run.clear()

        for piece in pieces:
            if not piece.trusted or self._control is None:
                run.append(piece.text)
                continue
            position = 0
            for match in self._control.finditer(piece.text):
                run.append(piece.text[position : match.start()])
                flush()
                content = match.group(match.lastindex or 0)
                ids.append(np.asarray([self.control_ids[content]], dtype=np.uint32))
                position = match.end()
            run.append(piece.text[position:])
        flush()
        return np.concatenate(ids) if ids else np.empty(0, dtype=np.uint32)

    def decode(self, ids: Sequence[int] | TokenIds, *, skip_control: bool = True) -> str:
        """Text of `ids`; control tokens are left out unless asked for."""
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_control)
        return text

    def _encode_apart(self, text: str) -> list[int]:
        """Ordinary text whose merges yield a control id: cut that token's text in characters."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token not in self._control_id_set:
                ids.append(token)
                continue
            for character in text[start:end]:
                single = self._tokenizer.encode(character, add_special_tokens=False).ids
                ids.extend(i for i in single if i not in self._control_id_set)
        return ids

    def _find_eos_ids(self, folder: Path) -> frozenset[int]:
        """generation_config.json first: it names every id that ends an answer."""
        for name in ("generation_config.json", "config.json"):
            value = read_json(folder / name).get("eos_token_id")
            if value is not None:
                return frozenset(value if isinstance(value, list) else [value])
        eos = self.control_ids.get(self.special_tokens.get("eos_token", ""))
        if eos is None:
            log.warning("no end-of-sequence token in %s: answers end only at their length", folder)
            return frozenset()
        return frozenset([eos])


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is none. Raises ModelError when it is damaged."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds {type(data).__name__}, an object is expected")
    return data


def _control_pattern(control: Sequence[dict[str, Any]]) -> re.Pattern[str] | None:
    """Longest first, so that a token that begins another never hides it; lstrip/rstrip swallow white space."""
    if not control:
        return None
    ordered = sorted(control, key=lambda token: len(token["content"]), reverse=True)
    return re.compile(
        "|".join(
            (r"\s*" if token.get("lstrip") else "")
            + f"({re.escape(token['content'])})"
            + (r"\s*" if token.get("rstrip") else "")
            for token in ordered
        )
    )


def _special_tokens(*configs: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … as text, from the first file that names them (as a string or an object)."""
    found: dict[str, str] = {}
    for config in configs:
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return found
