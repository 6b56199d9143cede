"""A tokenizer.json as this service uses it: text in, ids out, never a control token, exact to the byte.

Byte-level BPE (Llama 3, Qwen, SmolLM2) and SentencePiece-style BPE (Llama 2, Mistral) are known. In both every id
stands for fixed bytes, so offsets of tokens in the text are sums of lengths: no alignment, no re-encoding.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from service.ingest.base import IngestError

METASPACE = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's mapping of bytes to printable characters (Radford et al. 2019, encoder.py), inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(b): b for b in printable}
    for index, byte in enumerate(b for b in range(256) if b not in set(printable)):
        alphabet[chr(256 + index)] = byte
    return alphabet


class TextTokenizer:
    """Encodes pieces of text on all of rayon's threads."""

    def __init__(self, file: Path) -> None:
        """Raises IngestError unsupported_tokenizer."""
        try:
            spec: dict[str, Any] = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise IngestError("unsupported_tokenizer", f"{file} is no readable tokenizer.json: {error}") from error
        model = spec.get("model") or {}
        vocabulary = model.get("vocab")
        if model.get("type", "BPE") != "BPE" or not isinstance(vocabulary, dict):
            raise IngestError("unsupported_tokenizer", f"{file} holds a {model.get('type')} tokenizer, expected BPE")
        added = spec.get("added_tokens") or []
        self.control_ids = np.array(sorted(int(t["id"]) for t in added), dtype=np.uint32)
        # Without added tokens nothing in a text can match one; without a normalizer text keeps its form (no NFC).
        spec["added_tokens"], spec["post_processor"], spec["truncation"], spec["padding"] = [], None, None, None
        byte_level = "ByteLevel" in json.dumps([spec.get("decoder"), spec.get("pre_tokenizer")])
        if byte_level:
            spec["normalizer"] = None
        else:
            spec["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": METASPACE}
            spec["pre_tokenizer"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(spec))
        self._vocabulary, self._byte_level = vocabulary, byte_level
        size = max(max(vocabulary.values(), default=0), int(self.control_ids.max(initial=0))) + 1
        self.lengths: NDArray[np.uint32] = np.zeros(size, dtype=np.uint32)
        if byte_level:  # one character a byte
            self.lengths[list(vocabulary.values())] = list(map(len, vocabulary))
        else:
            for index, raw in _sentencepiece(vocabulary).items():
                self.lengths[index] = len(raw)
        self._is_control = np.zeros(size, dtype=bool)
        self._is_control[self.control_ids] = True

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Ids [tokens] of each text. Raises IngestError unsupported_tokenizer if a text wouldn't decode to itself."""
        out = []
        for text, encoding in zip(
            texts, self._tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True
        ):
            ids = np.array(encoding.ids, dtype=np.uint32)
            if int(self.lengths[ids].sum()) != len(text.encode()) or self._is_control[ids].any():
                ids = self._encode_carefully(text)
            out.append(ids)
        return out

    def _encode_carefully(self, text: str) -> NDArray[np.uint32]:
        """For vocabularies that miss characters or spell a control token by merges: byte by byte where needed."""
        bytes_of = _byte_level(self._vocabulary) if self._byte_level else _sentencepiece(self._vocabulary)
        by_bytes = {b: i for i, b in sorted(bytes_of.items(), reverse=True) if b and not self._is_control[i]}
        out: list[int] = []
        for char in text:
            ids = self._tokenizer.encode(char, add_special_tokens=False).ids
            raw = char.encode()
            if b"".join(bytes_of.get(i, b"") for i in ids) != raw or any(self._is_control[i] for i in ids):
                if any(raw[i : i + 1] not in by_bytes for i in range(len(raw))):
                    raise IngestError("unsupported_tokenizer", f"the tokenizer has no tokens for {char!r}")
                ids = [by_bytes[raw[i : i + 1]] for i in range(len(raw))]
            out += ids
        return np.array(out, dtype=np.uint32)


def _byte_level(vocabulary: dict[str, int]) -> dict[int, bytes]:
    alphabet = _byte_alphabet()
    out = {}
    for token, index in vocabulary.items():
        try:
            out[index] = bytes(alphabet[c] for c in token)
        except KeyError:  # a control token, spelled in plain characters
            out[index] = token.encode()
    return out


def _sentencepiece(vocabulary: dict[str, int]) -> dict[int, bytes]:
    out = {}
    for token, index in vocabulary.items():
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            out[index] = bytes([int(token[3:5], 16)])
        else:
            out[index] = token.replace(METASPACE, " ").encode()
    return out
