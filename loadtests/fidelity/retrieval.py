"""Synthetic retrieval beside RULER: needles at even depths for the heat map, and a JSON table asked by key."""

import random
from bisect import bisect_left
from itertools import accumulate, islice

from loadtests.fidelity.filler import Filler
from loadtests.fidelity.tasks import CountTokens, Question, TaskDocument, fit
from loadtests.fidelity.words import distinct, number, random_uuid, word_key


def needle_map(
    *, num_tokens: int, seed: int, count_tokens: CountTokens, filler: Filler, num_questions: int
) -> TaskDocument:
    """Question i asks for the needle at depth (i + 0.5) / num_questions of the document."""
    rng = random.Random(f"needle_map/{seed}")
    keys = distinct(rng, word_key, num_questions)
    values = distinct(rng, number, num_questions)
    text_seed = rng.random()

    def build(size: int) -> str:
        passages = list(islice(filler.passages(random.Random(text_seed)), size))
        ends = list(accumulate(map(len, passages)))
        pieces: list[str] = []
        taken = 0
        for index, (key, value) in enumerate(zip(keys, values, strict=True)):
            depth = (index + 0.5) / num_questions
            upto = bisect_left(ends, depth * ends[-1]) if ends else 0
            pieces += [*passages[taken:upto], f"One of the special magic numbers for {key} is: {value}."]
            taken = upto
        return "\n".join([*pieces, *passages[taken:]])

    questions = tuple(
        Question(f"What is the special magic number for {key} mentioned in the document?", (value,), "", 24)
        for key, value in zip(keys, values, strict=True)
    )
    text, used = fit(build, num_tokens, count_tokens)
    return TaskDocument("needle_map", text, questions, used)


def key_values(*, num_tokens: int, seed: int, count_tokens: CountTokens, num_questions: int) -> TaskDocument:
    """A JSON object of UUIDs; a question gives a key and wants its value."""
    rng = random.Random(f"key_values/{seed}")
    keys = distinct(rng, random_uuid, num_tokens // 20)
    values = [random_uuid(rng) for _ in keys]

    def build(size: int) -> str:
        pairs = zip(keys[:size], values[:size], strict=True)
        return "{" + ",\n".join(f'"{key}": "{value}"' for key, value in pairs) + "}"

    text, used = fit(build, num_tokens, count_tokens)
    kept = text.count("\n") + 1
    if kept < num_questions:
        raise ValueError(f"{num_questions} questions were asked for, {num_tokens} tokens hold {kept} pairs")
    questions = tuple(
        Question(f'What is the value of the key "{keys[i]}" in the document?', (values[i],), "", 56)
        for i in rng.sample(range(kept), num_questions)
    )
    return TaskDocument("key_values", text, questions, used)
