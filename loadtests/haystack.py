"""Long documents of real text with needles, from what exists on any machine: Python's own sources and our documents.

Needle and question have the wording that the default model's adapter was trained on.
"""

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from engine.chain import TokenIds

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_PLACES = ["harbor", "meadow", "canyon", "lantern", "orchard", "glacier", "thicket", "pebble", "willow", "summit"]
_MANNERS = ["tidy", "brisk", "amber", "quiet", "hollow", "copper", "gentle", "rusty", "velvet", "distant"]


@dataclass(frozen=True)
class Haystack:
    """`prefix` ends behind the document; each question has its own 7-digit answer."""

    prefix: TokenIds
    questions: tuple[TokenIds, ...]
    answers: tuple[str, ...]


def real_text(tokenizer: Tokenizer, num_tokens: int, *, seed: int) -> TokenIds:
    """At least `num_tokens` ids of Python's standard library and this repository's documents, files shuffled."""
    root = Path(__file__).parent.parent
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) + sorted(root.glob("**/*.md"))
    random.Random(seed).shuffle(files)
    pieces: list[np.ndarray] = []
    total = 0
    for file in files:
        text = f"==> {file.name} <==\n" + file.read_text(encoding="utf-8", errors="replace") + "\n"
        pieces.append(encode(tokenizer, text))
        total += len(pieces[-1])
        if total >= num_tokens:
            return np.concatenate(pieces)
    raise ValueError(f"only {total} tokens of real text on this machine, {num_tokens} are needed")


def haystack(tokenizer: Tokenizer, num_tokens: int, *, needles: int, seed: int = 0) -> Haystack:
    """A prefix of exactly `num_tokens` with `needles` needles at even depths."""
    chance = random.Random(seed)
    names = [f"{manner}-{place}" for manner in _MANNERS for place in _PLACES]
    keys = chance.sample(names, needles)
    answers = tuple(str(chance.randrange(1_000_000, 10_000_000)) for _ in keys)
    head = encode(
        tokenizer, f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nRead the document.\n<document>\n"
    )
    tail = encode(tokenizer, "\n</document>\n")
    inserts = [
        encode(tokenizer, f"\nOne of the special magic numbers for {key} is: {answer}.\n")
        for key, answer in zip(keys, answers, strict=True)
    ]
    room = num_tokens - len(head) - len(tail) - sum(map(len, inserts))
    if room < needles:
        raise ValueError(f"{needles} needles do not fit into {num_tokens} tokens")
    text = real_text(tokenizer, room, seed=seed)[:room]
    pieces, last = [head], 0
    for index, insert in enumerate(inserts):
        cut = room * (2 * index + 1) // (2 * needles)
        pieces += [text[last:cut], insert]
        last = cut
    prefix = np.concatenate([*pieces, text[last:], tail]).astype(np.uint32)
    questions = tuple(
        encode(
            tokenizer,
            f"What is the special magic number for {key} mentioned in the document?<|im_end|>\n<|im_start|>assistant\n",
        )
        for key in keys
    )
    return Haystack(prefix, questions, answers)


def encode(tokenizer: Tokenizer, text: str) -> TokenIds:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
