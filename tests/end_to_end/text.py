"""Real text of a wanted length with needles in it: the standard library's own source, the same on every run."""

import random
import sysconfig
from pathlib import Path

KEYS = ("tidy-harbor", "amber-falcon", "quiet-meadow", "brisk-lantern", "silver-orchard", "mellow-canyon")


def library_text(size_chars: int, *, skip: int = 0) -> str:
    parts: list[str] = []
    length = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[skip:]:
        text = path.read_text(encoding="utf-8", errors="replace")
        parts.append(text)
        length += len(text)
        if length >= size_chars:
            break
    return "".join(parts)[:size_chars]


def with_needles(text: str, count: int = 3, *, seed: int = 7) -> tuple[str, dict[str, str]]:
    """Put `count` magic numbers at even depths. Returns the text and {key: number}."""
    draw = random.Random(seed)
    needles = {key: str(draw.randrange(1_000_000, 10_000_000)) for key in KEYS[:count]}
    lines = text.split("\n")
    for position, (key, number) in reversed(list(enumerate(needles.items()))):
        at = int(len(lines) * (position + 0.5) / count)
        lines.insert(at, f"One of the special magic numbers for {key} is: {number}.")
    return "\n".join(lines), needles


def question(key: str) -> str:
    return f"What is the special magic number for {key} mentioned in the document?"
