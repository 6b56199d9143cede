"""Documents to upload and questions to ask about them: Python's own sources with numbers hidden in them, seeded."""

import random
import sysconfig
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHARS_PER_TOKEN = 3.2  # of such text with the default model's tokeniser
KEYS = ("tidy-harbor", "amber-falcon", "quiet-meadow", "brisk-lantern", "silver-orchard", "mellow-canyon")


@dataclass(frozen=True)
class Text:
    """`numbers`: the answer to each question about it."""

    name: str
    data: bytes
    numbers: dict[str, str]


class Texts:
    """Each text is another one, and the same seed gives the same texts in the same order, whoever draws them."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._count = 0
        self._lock = threading.Lock()

    def draw(self, num_tokens: int, *, needles: int = 3) -> Text:
        """About so many tokens."""
        with self._lock:
            self._count += 1
            number = self._count
        chance = random.Random(f"{self._seed}:{number}")
        size = int(num_tokens * CHARS_PER_TOKEN)
        source = corpus()
        start = chance.randrange(len(source) - size)
        lines = source[start : start + size].split("\n")
        numbers = {key: str(chance.randrange(1_000_000, 10_000_000)) for key in chance.sample(KEYS, needles)}
        for position, (key, answer) in reversed(list(enumerate(numbers.items()))):
            line = f"One of the special magic numbers for {key} is: {answer}."
            lines.insert(int(len(lines) * (position + 0.5) / needles), line)
        name = f"part-{self._seed}-{number}.txt"
        return Text(name, "\n".join(lines).encode(), {question(key): answer for key, answer in numbers.items()})


def question(key: str) -> str:
    return f"What is the special magic number for {key} mentioned in the document?"


@cache
def corpus() -> str:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
