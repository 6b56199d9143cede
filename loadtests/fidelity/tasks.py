"""RULER's eleven synthetic tasks that need no download, as documents with questions that come later.

Definitions: Hsieh et al., *RULER: What's the Real Context Size of Your Long-Context Language Models?* (2024) and the
parameters of its public repository (key and value types, four hops, 30 against 3 occurrences, Zipf exponent 2).
What differs, and why:

- The document is read first and every question comes after it (shared context, as in SCBench), so one document carries
  several questions. Each question has its own needle or chain; `num_questions=1` gives RULER's own layout. `cwe` and
  `fwe` have one answer a document, so their further questions are other wordings of the same one.
- There is no worked example in the prompt.
- The essay haystack is a `Filler` (source code, prose, contracts), not Paul Graham's essays.

Everything follows from the seed, the filler and the token counter.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise

from loadtests.fidelity.filler import Filler
from loadtests.fidelity.words import coded_word, distinct, number, random_uuid, variable_name, word_key

CountTokens = Callable[[str], int]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_COMMON_WORDS, _COMMON_REPEATS, _RARE_REPEATS = 10, 30, 3
_NUM_HOPS = 4
_ZIPF_EXPONENT = 2.0


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a document that was already read.

    `answers` are the strings that the reply must contain; `answer_prefix` is what the reply is made to begin with.
    """

    text: str
    answers: tuple[str, ...]
    answer_prefix: str
    max_new_tokens: int

    def score(self, reply: str) -> float:
        """The share of the answers that the reply contains, ignoring case (RULER's `string_match_all`), 0 to 1."""
        lowered = reply.lower()
        return sum(answer.lower() in lowered for answer in self.answers) / len(self.answers)


@dataclass(frozen=True, slots=True)
class TaskDocument:
    """A document of at most the asked number of tokens, and its questions."""

    task: str
    text: str
    questions: tuple[Question, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Needles:
    """RULER's parameters of one needle task; counts are per question."""

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


_NEEDLE_TASKS = {
    "niah_single_1": _Needles("noise"),
    "niah_single_2": _Needles("essay"),
    "niah_single_3": _Needles("essay", value="uuids"),
    "niah_multikey_1": _Needles("essay", keys=4),
    "niah_multikey_2": _Needles("needle"),
    "niah_multikey_3": _Needles("needle", key="uuids", value="uuids"),
    "niah_multivalue": _Needles("essay", values=4),
    "niah_multiquery": _Needles("essay", keys=4, queries=4),
}
TASKS = (*_NEEDLE_TASKS, "vt", "cwe", "fwe")

_MAKERS: dict[str, Callable[[random.Random], str]] = {"words": word_key, "numbers": number, "uuids": random_uuid}


def make_document(
    task: str, *, num_tokens: int, seed: int, count_tokens: CountTokens, filler: Filler, num_questions: int = 10
) -> TaskDocument:
    """One document of the task with `num_questions` questions.

    `num_tokens` bounds the document's text as `count_tokens` counts it; the result is within 3 % of it.
    Raises `ValueError` for an unknown task, and when the needles alone need more than `num_tokens`.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}, expected one of {', '.join(TASKS)}")
    if num_questions < 1:
        raise ValueError(f"num_questions must be at least 1, got {num_questions}")
    rng = random.Random(f"{task}/{seed}")
    if task in _NEEDLE_TASKS:
        build, questions = _needles(_NEEDLE_TASKS[task], rng, filler, num_questions)
    elif task == "vt":
        build, questions = _variable_chains(rng, num_questions)
    elif task == "cwe":
        build, questions = _common_words(rng, filler, num_questions)
    else:
        build, questions = _frequent_words(rng, num_tokens, num_questions)
    text, used = fit(build, num_tokens, count_tokens)
    return TaskDocument(task, text, questions, used)


def in_reading_order(document: TaskDocument, answers: Sequence[str]) -> list[str]:
    """Answers in an order that can be learnt: as asked for several keys, by frequency for fwe, else as they appear."""
    if document.task in ("niah_multiquery", "vt", "fwe"):
        return list(answers)
    find: Callable[[str], int] = document.text.find
    return sorted(answers, key=lambda answer: find(f" {answer} ") if document.task == "cwe" else find(answer))


def fit(build: Callable[[int], str], num_tokens: int, count_tokens: CountTokens) -> tuple[str, int]:
    """The text `build(size)` of the largest size found whose tokens fit, and their number.

    `build` must grow with `size`, about in proportion. Raises `ValueError` if even `build(0)` is too long.
    """
    base = count_tokens(build(0))
    if base > num_tokens:
        raise ValueError(f"a document of {num_tokens} tokens was asked for, its needles alone have {base}")
    probe = 64
    slope = max((count_tokens(build(probe)) - base) / probe, 1e-3)
    low, high, size = 0, 0, int((num_tokens - base) / slope)
    best, best_tokens = build(0), base
    for _ in range(12):
        text = build(size)
        used = count_tokens(text)
        if used <= num_tokens:
            low = size
            best, best_tokens = text, used
            if used >= 0.985 * num_tokens:
                break
        else:
            high = size
        slope = max((used - base) / max(size, 1), 1e-3)
        size = int((num_tokens * 0.995 - base) / slope)
        # Pieces differ in length: once both sides are known, a guess outside them is replaced by their middle.
        if high and not low < size < high:
            size = (low + high) // 2
        if size == low:
            break
    return best, best_tokens


def spread(rng: random.Random, haystack: Sequence[str], inserts: Sequence[str]) -> list[str]:
    """The haystack's pieces with the inserts put between them, in order, at depths drawn uniformly."""
    depths = sorted(rng.random() for _ in inserts)
    pieces: list[str] = []
    taken = 0
    for depth, insert in zip(depths, inserts, strict=True):
        upto = int(depth * (len(haystack) + 1))
        pieces += [*haystack[taken:upto], insert]
        taken = upto
    return [*pieces, *haystack[taken:]]


def _needles(
    spec: _Needles, rng: random.Random, filler: Filler, num_questions: int
) -> tuple[Callable[[int], str], tuple[Question, ...]]:
    make_key, make_value = _MAKERS[spec.key], _MAKERS[spec.value]
    keys = distinct(rng, make_key, spec.keys * num_questions)
    values = {key: distinct(rng, make_value, spec.values) for key in keys}
    needles = [_NEEDLE.format(kind=spec.value, key=key, value=value) for key in keys for value in values[key]]
    rng.shuffle(needles)
    asked = keys if spec.queries > 1 else rng.sample(keys, num_questions)
    questions = tuple(
        _needle_question(spec, group, [value for key in group for value in values[key]])
        for group in (asked[i : i + spec.queries] for i in range(0, spec.queries * num_questions, spec.queries))
    )
    seed = rng.random()
    taken = frozenset(keys)

    def build(size: int) -> str:
        pieces = list(islice(_haystack(spec, random.Random(seed), filler, taken), size))
        several = spec.values * spec.queries > 1
        kind = spec.value if several else spec.value[:-1]
        opening = (
            f"{'Some' if several else 'A'} special magic {kind} {'are' if several else 'is'} hidden within the "
            f"following text. Make sure to memorize it. I will quiz you about the {kind} afterwards."
        )
        return "\n".join([opening, *spread(random.Random(seed), pieces, needles)])

    return build, questions


def _needle_question(spec: _Needles, keys: Sequence[str], answers: Sequence[str]) -> Question:
    several = spec.values * spec.queries > 1
    kind = spec.value if several else spec.value[:-1]
    query = f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]
    subject = f"the special magic {kind} for {query} mentioned in the provided text"
    return Question(
        text=f"What {'are all' if several else 'is'} {subject}?",
        answers=tuple(answers),
        answer_prefix=f"T{subject[1:]} {'are' if several else 'is'}",
        max_new_tokens=128 if several else 56,
    )


def _haystack(spec: _Needles, rng: random.Random, filler: Filler, taken: frozenset[str]) -> Iterator[str]:
    if spec.haystack == "essay":
        yield from filler.passages(rng)
    while True:
        if spec.haystack == "noise":
            yield NOISE
            continue
        key = _MAKERS[spec.key](rng)
        value = _MAKERS[spec.value](rng)
        if key not in taken:
            yield _NEEDLE.format(kind=spec.value, key=key, value=value)


def _variable_chains(rng: random.Random, num_questions: int) -> tuple[Callable[[int], str], tuple[Question, ...]]:
    length = _NUM_HOPS + 1
    names = distinct(rng, variable_name, length * num_questions)
    values = distinct(rng, lambda r: str(r.randint(10_000, 99_999)), num_questions)
    chains, questions = [], []
    for i, value in enumerate(values):
        chain = names[i * length : (i + 1) * length]
        chains.append([f"VAR {chain[0]} = {value}"] + [f"VAR {b} = VAR {a}" for a, b in pairwise(chain)])
        questions.append(
            Question(
                text=f"Question: Find all variables that are assigned the value {value} in the text above.",
                answers=tuple(chain),
                answer_prefix=(
                    "Answer: According to the chain(s) of variable assignment in the text above, "
                    f"{length} variables are assigned the value {value}, they are:"
                ),
                max_new_tokens=60,
            )
        )
    lines = _interleave(rng, chains)
    seed = rng.random()

    def build(size: int) -> str:
        opening = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
        return "\n".join([opening, *spread(random.Random(seed), [NOISE] * size, lines)])

    return build, tuple(questions)


def _interleave(rng: random.Random, chains: Sequence[Sequence[str]]) -> list[str]:
    """All lines, mixed at random, each chain's own order kept."""
    order = [i for i, chain in enumerate(chains) for _ in chain]
    rng.shuffle(order)
    iterators = [iter(chain) for chain in chains]
    return [next(iterators[i]) for i in order]


_CWE_WORDINGS = (
    "Question: What are the 10 most common words in the above list?",
    "Question: Which 10 words appear most often in the above list?",
    "Question: List the 10 most frequent words of the numbered list.",
    "Question: Name the ten words that occur most often in the list.",
    "Question: Some words are repeated more often than the others. Which 10 are they?",
    "Question: Give the 10 words with the highest number of occurrences in the list.",
    "Question: What are the ten most frequent words in the above list?",
    "Question: Find the 10 words that appear most often.",
    "Question: Which ten words are the most common in the document's list?",
    "Question: Write down the 10 most common words, separated by commas.",
)
_FWE_WORDINGS = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?",
    "Question: Which three coded words appear most often in the text? Ignore the dots.",
    "Question: Ignoring the dots, what are the 3 most frequent coded words?",
    "Question: List the three most common coded words of the above text.",
    "Question: Name the three coded words with the highest number of occurrences. Ignore '...'.",
    "Question: Find the three most frequently appeared coded words.",
    "Question: What are the top 3 coded words by frequency in the coded text?",
    "Question: Without explanation: which three words of the coded text occur most often?",
    "Question: Give the three most repeated coded words, not counting the dots.",
    "Question: Write down the three most frequent words in the above coded text.",
)


def _reworded(
    wordings: Sequence[str], num_questions: int, answers: Sequence[str], answer_prefix: str, max_new_tokens: int
) -> tuple[Question, ...]:
    return tuple(
        Question(wordings[i % len(wordings)], tuple(answers), answer_prefix, max_new_tokens)
        for i in range(num_questions)
    )


def _common_words(
    rng: random.Random, filler: Filler, num_questions: int
) -> tuple[Callable[[int], str], tuple[Question, ...]]:
    words = rng.sample(filler.words, len(filler.words))
    common, rare = words[:_COMMON_WORDS], words[_COMMON_WORDS:]
    seed = rng.random()

    def build(size: int) -> str:
        extra = random.Random(seed)
        needed = max(size - len(rare), 0)
        # Past the machine's own vocabulary, compounds of two of its words keep every rare word different.
        more = distinct(extra, lambda r: r.choice(rare) + r.choice(rare), needed) if needed else []
        entries = common * _COMMON_REPEATS + [*rare[:size], *more] * _RARE_REPEATS
        extra.shuffle(entries)
        opening = (
            "Below is a numbered list of words. In these words, some appear more often than others. "
            "Memorize the ones that appear most often.\n"
        )
        return opening + " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1))

    prefix = "Answer: The top 10 words that appear most often in the list are:"
    return build, _reworded(_CWE_WORDINGS, num_questions, common, prefix, 120)


def _frequent_words(
    rng: random.Random, num_tokens: int, num_questions: int
) -> tuple[Callable[[int], str], tuple[Question, ...]]:
    vocabulary = ["...", *distinct(rng, partial(coded_word, length=6), max(num_tokens // 50, 8))]
    zeta = 1.6449340668482264  # of the exponent 2
    seed = rng.random()

    def build(size: int) -> str:
        entries = [
            word
            for rank, word in enumerate(vocabulary, 1)
            for _ in range(int((size + 200) * rank**-_ZIPF_EXPONENT / zeta))
        ]
        random.Random(seed).shuffle(entries)
        opening = (
            "Read the following coded text and track the frequency of each coded word. "
            "Find the three most frequently appeared coded words. "
        )
        return opening + " ".join(entries)

    prefix = "Answer: According to the coded text above, the three most frequently appeared words are:"
    return build, _reworded(_FWE_WORDINGS, num_questions, vocabulary[1:4], prefix, 50)
