"""Real text with questions whose answers stand in it: a repository's source and a folder of contracts."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from loadtests.fidelity.filler import in_split, split_passages, stdlib_files
from loadtests.fidelity.tasks import CountTokens, Question, TaskDocument, fit

REPOSITORY_TASKS = ("repository_parameters", "repository_file")
CONTRACT_TASKS = ("contract_terms", "contract_sections", "contract_lines")

_HEADER = "==> {} <==\n"
_HEADER_LINE = re.compile(r"^==> (.+) <==$", re.MULTILINE)
_DEFINITION = re.compile(r"^[ ]*def ([a-zA-Z]\w{4,})\(([^()\n]{3,80})\)(?: ->[^:\n]+)?:$", re.MULTILINE)
_TERM = re.compile(
    r"[\"“]([A-Z][A-Za-z \-]{2,40})[\"”]\s+(shall mean|means)\s+((?:[\w'’,\-]+[ \n]+){6,12}?)[\w'’]", re.MULTILINE
)
_SECTION = re.compile(r"^\s*(?:Section |SECTION )?(\d+\.\d+)\.? +([A-Z][A-Za-z ,\-]{5,50}?)\.", re.MULTILINE)
_MAX_FILE_CHARS = 16_000  # so that a short document has more than one file
_LEAST_LINE, _LONGEST_LINE = 30, 120


def load_repository() -> list[tuple[str, str]]:
    """(path, text) of the standard library's sources with functions in them that no model of ours was trained on."""
    found = [(str(path), file.read_text(encoding="utf-8", errors="replace")) for path, file in stdlib_files()]
    return [(path, text) for path, text in found if _DEFINITION.search(text) and in_split(text, "eval")]


def load_contracts(folder: Path) -> list[tuple[str, str]]:
    """(name, text) of every .txt and .md file under `folder`. Raises FileNotFoundError where there is none."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md") and path.is_file())
    if not files:
        raise FileNotFoundError(f"no .txt or .md file under {folder}")
    return [(path.name, path.read_text(encoding="utf-8", errors="replace")) for path in files]


def make_source_document(
    task: str,
    files: Sequence[tuple[str, str]],
    *,
    num_tokens: int,
    seed: int,
    count_tokens: CountTokens,
    num_questions: int,
) -> TaskDocument:
    """Files in random order, long ones cut, and as many different questions as asked for.

    Those that hold an answer come first. Raises ValueError where the files are too short, or hold too few answers.
    """
    kind = "repository" if task in REPOSITORY_TASKS else "contract"
    rng = random.Random(f"{task}/{seed}")
    order = rng.sample(list(files), len(files))
    order.sort(key=lambda file: not _has_answer(task, *file))
    pieces = [piece for name, text in order for piece in _pieces(name, text)]
    text, used = fit(lambda size: "\n\n".join(pieces[:size]), num_tokens, count_tokens)
    if used < 0.95 * num_tokens:
        raise ValueError(f"{num_tokens} tokens of {kind} text were asked for, there are {used}")
    found = _QUESTIONS[task](text)
    if len(found) < num_questions:
        raise ValueError(f"{task}: {num_questions} questions were asked for, {num_tokens} tokens hold {len(found)}")
    questions = rng.sample(found, num_questions)
    return TaskDocument(task, text, tuple(questions), used)


@cache
def _has_answer(task: str, name: str, text: str) -> bool:
    return bool(_QUESTIONS[task]("\n\n".join(_pieces(name, text))))


def _pieces(name: str, text: str) -> Iterator[str]:
    header = _HEADER.format(name)
    for passage in split_passages(text[:_MAX_FILE_CHARS].replace("\r\n", "\n")):
        yield header + passage
        header = ""


def _single(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those whose key occurs once."""
    keys = [key for key, _ in pairs]
    return [(key, value) for key, value in pairs if keys.count(key) == 1]


def _parameters(text: str) -> list[Question]:
    return [
        Question(f"What are the parameters of the function {name}?", (parameters,), "", 48)
        for name, parameters in _single(_DEFINITION.findall(text))
    ]


def _files(text: str) -> list[Question]:
    parts = _HEADER_LINE.split(text)[1:]
    places = [
        (name, path)
        for path, source in zip(parts[::2], parts[1::2], strict=True)
        for name, _ in _DEFINITION.findall(source)
    ]
    return [
        Question(
            f"In which file is the function {name} defined?", (path,), f"The function {name} is defined in the file", 24
        )
        for name, path in _single(places)
    ]


def _terms(text: str) -> list[Question]:
    found = [(term, (verb, " ".join(words.split()))) for term, verb, words in _TERM.findall(text)]
    terms = [term for term, _ in found]
    return [
        Question(f'What does the term "{term}" mean in the document?', (words,), f'The term "{term}" {verb}', 32)
        for term, (verb, words) in found
        if terms.count(term) == 1
    ]


def _sections(text: str) -> list[Question]:
    return [
        Question(f"What is the title of section {number} in the document?", (title,), f"Section {number} is titled", 24)
        for number, title in _single(_SECTION.findall(text))
    ]


def _lines(text: str) -> list[Question]:
    lines = text.split("\n")
    counts: dict[str, int] = {}
    for line in lines:
        counts[line] = counts.get(line, 0) + 1
    return [
        Question(f"Quote the line that follows this line in the document: {line.strip()}", (after.strip(),), "", 64)
        for line, after in pairwise(lines)
        if counts[line] == 1 and all(_LEAST_LINE <= len(part.strip()) <= _LONGEST_LINE for part in (line, after))
    ]


_QUESTIONS: dict[str, Callable[[str], list[Question]]] = {
    "repository_parameters": _parameters,
    "repository_file": _files,
    "contract_terms": _terms,
    "contract_sections": _sections,
    "contract_lines": _lines,
}
