"""Haystack text that is on any machine: the standard library's sources, generated prose, and a folder if given.

Texts are split by a hash of their content into `train` (four fifths) and `eval`, so that what a model was adapted on is
never what it is measured on.
"""

import hashlib
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from loadtests.fidelity.words import ADJECTIVES, NOUNS

SPLITS = ("train", "eval", "all")
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_TEXT_SUFFIXES = {".txt", ".md", ".py", ".c", ".h", ".rst"}
_WORD = re.compile(r"\b[a-z]{4,9}\b")
_MAX_PASSAGE_CHARS = 700

_PLACES = (
    "Lisbon",
    "Nairobi",
    "Oslo",
    "Quito",
    "Hanoi",
    "Turin",
    "Perth",
    "Lima",
    "Cork",
    "Bergen",
    "Kyoto",
    "Dakar",
    "Sofia",
    "Tampa",
    "Utrecht",
    "Zagreb",
)
_PEOPLE = (
    "committee",
    "board",
    "council",
    "team",
    "society",
    "union",
    "office",
    "panel",
    "guild",
    "court",
    "ministry",
    "museum",
    "choir",
    "club",
)
_VERBS = (
    "approved",
    "reviewed",
    "postponed",
    "praised",
    "described",
    "rejected",
    "measured",
    "repaired",
    "recorded",
    "visited",
    "sketched",
    "sold",
)
_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)


class Filler:
    """Texts cut into passages of a few hundred characters.

    `texts` is a sequence of whole documents; it must not be empty (`ValueError`).
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.documents = [passages for text in texts if (passages := split_passages(text))]
        if not self.documents:
            raise ValueError("filler needs at least one text that is not empty, got none")
        self.texts = list(texts)
        self._words: list[str] = []

    def passages(self, rng: random.Random) -> Iterator[str]:
        """Runs of neighbouring passages, each run from a text drawn at random; never ends."""
        while True:
            if rng.random() < 0.1:
                yield from (prose(rng) for _ in range(rng.randint(2, 6)))
                continue
            document = rng.choice(self.documents)
            start = rng.randrange(len(document))
            yield from document[start : start + rng.randint(3, 30)]

    @property
    def words(self) -> list[str]:
        """English-looking words of 4 to 9 letters that occur at least twice, sorted."""
        if not self._words:
            counts: dict[str, int] = {}
            for text in self.texts:
                for word in _WORD.findall(text):
                    counts[word] = counts.get(word, 0) + 1
            self._words = sorted({*ADJECTIVES, *NOUNS, *(word for word, count in counts.items() if count > 1)})
        return self._words


def load_filler(split: str = "all", folders: Iterable[Path] = (), *, max_files: int | None = None) -> Filler:
    """Read the standard library's sources and every text file under `folders`.

    `split` is `train`, `eval` or `all`; `max_files` keeps only the first so many (in path order) of the split.
    Raises `ValueError` for another split and `FileNotFoundError` for a folder that is not there.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    paths = [file for _, file in stdlib_files()]
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"filler folder {folder} does not exist")
        paths += sorted(path for path in folder.rglob("*") if path.suffix.lower() in _TEXT_SUFFIXES and path.is_file())
    texts: list[str] = []
    for path in paths:
        text = path.read_bytes().decode("utf-8", errors="ignore").replace("\r\n", "\n")
        if len(text) > 200 and in_split(text, split):
            texts.append(text)
        if max_files is not None and len(texts) >= max_files:
            break
    return Filler(texts)


def in_split(text: str, split: str) -> bool:
    """Whether a text belongs to the split: one text in five, by hash of its content, is for evaluation."""
    held_out = hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % 5 == 0
    return split == "all" or held_out == (split == "eval")


def split_passages(text: str) -> list[str]:
    """Cut at blank lines, then at line ends, into passages of at most about 700 characters."""
    passages: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        current = ""
        for line in block.splitlines():
            line = line[:_MAX_PASSAGE_CHARS].rstrip()
            if current and len(current) + len(line) > _MAX_PASSAGE_CHARS:
                passages.append(current)
                current = ""
            current = f"{current}\n{line}" if current else line
        if current.strip():
            passages.append(current)
    return passages


def prose(rng: random.Random) -> str:
    """A short paragraph of plain generated sentences."""
    sentences = [
        f"In {rng.choice(_MONTHS)} the {rng.choice(_PEOPLE)} in {rng.choice(_PLACES)} {rng.choice(_VERBS)} the "
        f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} near the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        for _ in range(rng.randint(2, 5))
    ]
    return ". ".join(sentences) + "."


def stdlib_files() -> Iterator[tuple[Path, Path]]:
    """(path inside the library, file) of the standard library's sources without its tests, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _SKIPPED_FOLDERS.intersection(relative.parts):
            yield relative, path
