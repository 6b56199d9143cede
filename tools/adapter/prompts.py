"""The chat format of the default model, and the short prompts on which the base model's own answers are replayed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from loadtests.fidelity.filler import Filler

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
DOCUMENT_OPEN = "<|im_start|>user\nRead the document.\n<document>\n"
DOCUMENT_CLOSE = "\n</document>\n"
ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"
STOP = "<|im_end|>"

_THINGS = """
photosynthesis, gravity, inflation, democracy, recursion, evaporation, electricity, friendship, algebra, evolution,
a volcano, an algorithm, a contract, a database, a solar eclipse, a compiler, an atom, a vaccine, the internet,
a glacier, the moon, a black hole, a bridge, a battery, a triangle, the stock market, a haiku, a verb, yeast, rust,
a rainbow
"""
_TOPICS = """
the sea, autumn, a lost dog, a small village, the night sky, a train journey, an old clock, the first day of school,
a robot, a garden in spring, a lighthouse keeper, the desert, a rainy afternoon, two brothers, a market, winter,
a violin, a mountain path, a curious cat, a library
"""
_COUNTRIES = """
France, Japan, Brazil, Kenya, Norway, Canada, Egypt, India, Italy, Peru, Poland, Spain, Turkey, Vietnam, Greece,
Portugal, Australia, Mexico, Sweden, Germany, Ireland, Chile, Finland, Austria
"""
_CODE = """
reverses a string, checks whether a number is prime, counts the words in a file, sorts a list of pairs by the second
item, computes a factorial, merges two dictionaries, finds the largest number in a list, removes duplicates from a
list, reads a CSV file, converts Celsius to Fahrenheit
"""
_LISTS = """
fruits, planets, ways to save water, tips for a job interview, healthy breakfasts, musical instruments, programming
languages, ideas for a birthday party, reasons to read books, rivers in Europe, kinds of trees, board games
"""
_SENTENCES = (
    "Send me the report now.",
    "I can't come to the meeting tomorrow.",
    "The food was terrible.",
    "You forgot to call me.",
    "We will not refund your order.",
    "This idea makes no sense.",
    "He don't like apples.",
    "The results was very good.",
)
_PASSAGE_FORMS = (
    "Summarize the following text in one sentence:\n{}",
    "What is the following text about?\n{}",
    "Give a short title for this text:\n{}",
    "List the main points of this text:\n{}",
    "Read the document.\n<document>\n{}\n</document>\nSummarize the document in two sentences.",
    "Read the document.\n<document>\n{}\n</document>\nWhat is this document about?",
    "Read the document.\n<document>\n{}\n</document>\nExplain the document to a beginner.",
)


class Codec:
    """Text to token ids and back; chat markers in the text become their control tokens."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.stop_id = int(self.tokenizer.token_to_id(STOP))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Replay:
    """A short chat: ids of the user's turn up to the assistant's header, and of the reply with its stop token."""

    prompt: list[int]
    reply: list[int]


def short_prompts(filler: Filler, seed: int, passages: int = 240) -> list[str]:
    """Several hundred different short user turns, shuffled."""
    rng = random.Random(seed)
    prompts: list[str] = []
    for thing in _items(_THINGS):
        prompts += [f"What is {thing}?", f"Explain {thing} in simple terms."]
    for topic in _items(_TOPICS):
        prompts += [f"Write a short poem about {topic}.", f"Write a story of three sentences about {topic}."]
    for country in _items(_COUNTRIES):
        prompts += [f"What is the capital of {country}?", f"Tell me one interesting fact about {country}."]
    for job in _items(_CODE):
        prompts += [f"Write a Python function that {job}.", f"How do I write a program that {job}?"]
    prompts += [f"List five {things}." for things in _items(_LISTS)]
    prompts += [f"Rewrite this sentence politely: {sentence}" for sentence in _SENTENCES]
    prompts += [f"Correct the grammar: {sentence}" for sentence in _SENTENCES]
    prompts += [f"What is {a} {op} {b}?" for op in ("plus", "minus", "times") for a, b in ((7, 5), (12, 4), (30, 9))]
    prompts += ["Hello!", "Who are you?", "How are you today?", "Thank you.", "Can you help me with an email?"]
    stream = filler.passages(rng)
    for _ in range(passages):
        text = "\n".join(next(stream) for _ in range(rng.randint(1, 3)))
        prompts.append(rng.choice(_PASSAGE_FORMS).format(text[:1200]))
    rng.shuffle(prompts)
    return prompts


def _items(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split(",")]
