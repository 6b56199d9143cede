"""Training windows: one document with many questions, so that its attention is paid once for all of them."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from loadtests.fidelity.filler import Filler
from loadtests.fidelity.tasks import TASKS, fit, in_reading_order, make_document
from loadtests.fidelity.words import distinct, random_uuid, word_key
from tools.adapter.prompts import ASSISTANT, DOCUMENT_CLOSE, DOCUMENT_OPEN, STOP, SYSTEM, Codec

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

MAX_POSITION = 524_288
_TASK_WEIGHTS = {
    "niah_single_1": 3, "niah_single_2": 5, "niah_single_3": 6, "niah_multikey_1": 7, "niah_multikey_2": 8,
    "niah_multikey_3": 12, "niah_multivalue": 9, "niah_multiquery": 7, "vt": 14, "cwe": 13, "fwe": 8,
    "source": 6, "key_values": 4,
}  # fmt: skip
_DEFINITION = re.compile(r"^[ ]*def (\w+)\(([^()\n]{3,80})\)(?: ->[^:\n]+)?:$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question after the document, what the reply is made to begin with ("" for nothing), and the rest of it."""

    question: str
    prefix: str
    reply: str


@dataclass(frozen=True, slots=True)
class Window:
    """Packed rows: `document_rows` of document (the first `document_tokens` real), then the questions' rows.

    `segments` numbers each question's rows (-1: padding). Row i predicts `targets[i]` with weight `weights[i]`.
    """

    task: str
    document_rows: int
    document_tokens: int
    ids: Ints
    positions: Ints
    segments: Ints
    targets: Ints
    weights: Floats


def make_window(rng: random.Random, codec: Codec, filler: Filler, *, document_rows: int, question_rows: int) -> Window:
    """A window of a task drawn at random; the document fills `document_rows` to a few percent."""
    room = document_rows - codec.count(SYSTEM + DOCUMENT_OPEN) - codec.count(DOCUMENT_CLOSE) - 2
    while True:
        task = rng.choices(list(_TASK_WEIGHTS), list(_TASK_WEIGHTS.values()))[0]
        # A tenth of the documents is shorter, so that no length is special.
        budget = int(room * rng.uniform(0.6, 1.0)) if rng.random() < 0.1 else room
        if task == "source":
            text, exchanges = _source(rng, codec, filler, budget)
        elif task == "key_values":
            text, exchanges = _key_values(rng, codec, budget)
        else:
            text, exchanges = _synthetic(task, rng, codec, filler, budget)
        window = pack(task, text, exchanges, rng, codec, document_rows=document_rows, question_rows=question_rows)
        # Prose without functions or short lines has nothing to ask about.
        if window.weights.any():
            return window


def pack(
    task: str,
    text: str,
    exchanges: Sequence[Exchange],
    rng: random.Random,
    codec: Codec,
    *,
    document_rows: int,
    question_rows: int,
) -> Window:
    """Tokenise, place and weight; questions that don't fit into `question_rows` are left out."""
    document = codec.encode(SYSTEM + DOCUMENT_OPEN) + codec.encode(text) + codec.encode(DOCUMENT_CLOSE)
    document = document[:document_rows]
    rows = document_rows + question_rows
    ids = np.full(rows, codec.stop_id, np.int64)
    positions, segments, targets = (
        np.zeros(rows, np.int64),
        np.full(question_rows, -1, np.int64),
        np.zeros(rows, np.int64),
    )
    weights = np.zeros(rows, np.float32)
    ids[: len(document)] = document
    positions[: len(document)] = skip_wise(len(document), rng)
    following = int(positions[len(document) - 1]) + 1

    row = document_rows
    for i, exchange in enumerate(exchanges):
        asked = codec.encode(exchange.question + ASSISTANT + exchange.prefix)
        reply = codec.encode((" " if exchange.prefix else "") + exchange.reply + STOP)
        both = asked + reply
        if row + len(both) > rows:
            continue
        end = row + len(both)
        ids[row:end] = both
        positions[row:end] = following + np.arange(len(both))
        segments[row - document_rows : end - document_rows] = i
        first = row + len(asked) - 1
        targets[first : end - 1] = reply
        # Between one weight a reply and one a token: UUIDs have four times the tokens of numbers.
        weights[first : end - 1] = len(reply) ** -0.5
        row = end
    return Window(task, document_rows, len(document), ids, positions, segments, targets, weights)


def skip_wise(count: int, rng: random.Random) -> Ints:
    """Positions of `count` tokens cut into 2 to 8 runs with jumps between them, so that short windows teach long
    distances (PoSE, Zhu et al. 2023); two in five windows stay contiguous."""
    positions = np.arange(count, dtype=np.int64)
    if rng.random() < 0.4 or count < 64:
        return positions
    span = int(count * (MAX_POSITION / count) ** rng.random())
    runs = rng.randint(2, 8)
    cuts = sorted(rng.sample(range(16, count), runs - 1))
    shares = [rng.random() for _ in cuts]
    for cut, share in zip(cuts, shares, strict=True):
        positions[cut:] += int((span - count) * share / sum(shares))
    return positions


def _synthetic(task: str, rng: random.Random, codec: Codec, filler: Filler, budget: int) -> tuple[str, list[Exchange]]:
    if task in ("cwe", "fwe"):
        num_questions = 3
    elif task == "vt":
        num_questions = rng.choice((1, 2, 4, 10))
    else:
        num_questions = rng.choice((1, 4, 10, 16))
    document = make_document(
        task, num_tokens=budget, seed=rng.getrandbits(40), count_tokens=codec.count, filler=filler,
        num_questions=num_questions,
    )  # fmt: skip
    text = document.text
    if task.startswith("niah") and rng.random() < 0.3:
        text = text.split("\n", 1)[1]  # without RULER's opening line
    exchanges = []
    order = rng.sample(document.questions, len(document.questions))
    for question in order:
        reply = ", ".join(in_reading_order(document, question.answers)) + "."
        plain = rng.random() < 0.5
        wording = question.text
        if rng.random() < 0.5:
            wording = wording.replace("provided text", "document").replace("text above", "document")
            wording = wording.removeprefix("Question: ")
        exchanges.append(Exchange(wording, "" if plain else question.answer_prefix, reply))
    return text, exchanges


def _source(rng: random.Random, codec: Codec, filler: Filler, budget: int) -> tuple[str, list[Exchange]]:
    """Real text: parameters of functions, and the line that follows a quoted one."""
    order = rng.sample(range(len(filler.documents)), len(filler.documents))

    def build(size: int) -> str:
        passages = (passage for i in order for passage in filler.documents[i])
        return "\n\n".join(islice(passages, size))

    text, _ = fit(build, budget, codec.count)
    definitions: dict[str, list[str]] = {}
    for name, parameters in _DEFINITION.findall(text):
        definitions.setdefault(name, []).append(parameters)
    single = [(name, found[0]) for name, found in definitions.items() if len(found) == 1]
    exchanges = [
        Exchange(f"What are the parameters of the function {name}?", "", f"{parameters}.")
        for name, parameters in rng.sample(single, min(8, len(single)))
    ]
    lines = text.split("\n")
    counts: dict[str, int] = {}
    for line in lines:
        counts[line] = counts.get(line, 0) + 1
    usable = [
        i
        for i in range(len(lines) - 1)
        if 25 <= len(lines[i]) <= 120 and counts[lines[i]] == 1 and 8 <= len(lines[i + 1].strip()) <= 120
    ]
    exchanges += [
        Exchange(f"Quote the line that follows this line in the document: {lines[i].strip()}", "", lines[i + 1].strip())
        for i in rng.sample(usable, min(8, len(usable)))
    ]
    rng.shuffle(exchanges)
    return text, exchanges


def _key_values(rng: random.Random, codec: Codec, budget: int) -> tuple[str, list[Exchange]]:
    """A JSON table of random keys and values, asked for by key."""
    make = rng.choice((random_uuid, word_key))
    keys = distinct(rng, make, min(budget // 20, 20_000))
    values = [random_uuid(rng) for _ in keys]

    def build(size: int) -> str:
        pairs = zip(keys[:size], values[:size], strict=True)
        return "{" + ",\n".join(f'"{key}": "{value}"' for key, value in pairs) + "}"

    text, _ = fit(build, budget, codec.count)
    known = text.count("\n") + 1
    asked = rng.sample(range(known), min(10, known))
    return text, [
        Exchange(f'What is the value of the key "{keys[i]}" in the document?', "", f"{values[i]}.") for i in asked
    ]


assert set(_TASK_WEIGHTS) == {*TASKS, "source", "key_values"}
