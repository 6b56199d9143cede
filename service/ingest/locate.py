"""From words back to their place: which file, page, line and tokens a passage of a document stands in.

    locate(folder, text) → list[Place]      exact match first, then one that forgives white space, quotes and page marks
    cite(folder, answer_text) → list[Citation]    quoted and code-like spans of an answer that stand in the document
    verify_quote(folder, quote) → Place | None    for quotes that a summary claims to have taken from it

`folder` is what an ingest wrote. Free of torch and of the tokenizer: the index is offsets.npy (the byte of document.txt
at which each token begins), memory-mapped; a document of a million tokens answers in milliseconds.
"""

import json
import mmap
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_QUOTE_CHARS = 4000
MAX_CANDIDATES = 200
MIN_QUOTE_CHARS = 8
MIN_SENTENCE_WORDS = 7

# Between two words of a passage: white space, or what stands between pages.
GAP = rb"(?:\s|\xc2\xa0|\[(?:page|slide|sheet|chapter) [^\]\n]{1,200}\]\n)+"
ALIKE = {
    **dict.fromkeys("'\u2018\u2019\u201a\u2032", "['\u2018\u2019\u201a\u2032]"),
    **dict.fromkeys('"\u201c\u201d\u201e\u2033', '["\u201c\u201d\u201e\u2033]'),
    **dict.fromkeys("-\u2010\u2011\u2012\u2013\u2014", "[-\u2010\u2011\u2012\u2013\u2014]"),
}
QUOTED = re.compile(
    r"“([^”\n]{3,2000})”|„([^“”\n]{3,2000})[“”]|«\s?([^»\n]{3,2000}?)\s?»|(?<!\w)\"([^\"\n]{3,2000})\"|```[\w+-]*\n(.{3,4000}?)```"
    r"|`([^`\n]{2,500})`",
    re.DOTALL,
)
CODE_LIKE = re.compile(
    r"[A-Za-z_][\w]*(?:(?:\.|::|->|/)[\w.-]+)+(?:\(\))?|\b[a-z]+(?:_[a-z0-9]+)+\b(?:\(\))?|\b\d[\d,.]*\d{4,}\b|\b\w+\(\)"
)
SENTENCE = re.compile(r"[^.!?\n]{20,600}[.!?]?")


@dataclass(frozen=True)
class Place:
    """Where a passage stands. `line` counts from 1, on the page where there are pages, in the file's text elsewhere.

    Lines end at \\n only, as editors and git count them. Tokens [token_start, token_end) cover the passage.
    """

    file: str
    page: int | None
    line: int
    token_start: int
    token_end: int
    page_label: str | None = None


@dataclass(frozen=True)
class Citation:
    """Characters [start, end) of an answer, the quote they hold, and its first place in the document."""

    start: int
    end: int
    quote: str
    place: Place


@dataclass(frozen=True)
class _Section:
    path: str
    token_start: int
    token_end: int
    pages: tuple[tuple[int, int, int, str | None], ...]  # token_start, token_end, page, label


class DocumentIndex:
    """One document's text, token offsets and sections, open for searching."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError, or ValueError for a manifest that is none."""
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
        self._sections = sorted(_sections(manifest), key=lambda s: s.token_start)
        self._starts = [section.token_start for section in self._sections]
        self._offsets: NDArray[np.uint64] = np.load(folder / "offsets.npy", mmap_mode="r")
        with open(folder / "document.txt", "rb") as file:
            self._text: mmap.mmap | bytes = (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                if (folder / "document.txt").stat().st_size
                else b""
            )

    def find(self, text: str, *, limit: int = 20) -> list[Place]:
        """Places of `text`, at most `limit`, in document order; those inside files only."""
        text = text.strip()[:MAX_QUOTE_CHARS]
        if not text:
            return []
        exact = self._places(self._exact(text.encode("utf-8", "replace")), limit)
        return exact or self._places(self._forgiving(text), limit)

    def _exact(self, needle: bytes) -> Iterator[tuple[int, int]]:
        at = self._text.find(needle)
        while at >= 0:
            yield at, at + len(needle)
            at = self._text.find(needle, at + 1)

    def _forgiving(self, text: str) -> Iterator[tuple[int, int]]:
        words = [_forgiving_word(word) for word in text.split()]
        for found in re.finditer(GAP.join(words), self._text):
            yield found.start(), found.end()

    def _places(self, spans: Iterator[tuple[int, int]], limit: int) -> list[Place]:
        out: list[Place] = []
        for start, end in spans:
            place = self._place(start, end)
            if place is not None:
                out.append(place)
                if len(out) >= limit:
                    break
        return out

    def _place(self, start: int, end: int) -> Place | None:
        first = int(np.searchsorted(self._offsets, start, side="right")) - 1
        behind = int(np.searchsorted(self._offsets, end, side="left"))
        at = bisect_right(self._starts, first) - 1
        if at < 0 or first >= self._sections[at].token_end:
            return None
        section = self._sections[at]
        page, label, line_from = None, None, section.token_start
        for page_start, page_end, number, page_label in section.pages:
            if page_start <= first < page_end:
                page, label, line_from = number, page_label, page_start
        line = 1 + self._text[int(self._offsets[line_from]) : start].count(b"\n")
        return Place(section.path, page, line, first, behind, label)


def _sections(manifest: dict[str, Any]) -> Iterator[_Section]:
    for row in manifest["files"]:
        if row.get("status") == "included" and not row.get("duplicate_of"):
            pages = tuple((p["token_start"], p["token_end"], p["page"], p.get("label")) for p in row.get("pages", ()))
            yield _Section(row["path"], row["token_start"], row["token_end"], pages)


def _forgiving_word(word: str) -> bytes:
    return "".join(ALIKE_GROUPS.get(c) or re.escape(c) for c in word).encode("utf-8", "replace")


# As alternations of whole characters: a class of bytes would match half of one.
ALIKE_GROUPS = {c: "(?:" + "|".join(re.escape(x) for x in group.strip("[]")) + ")" for c, group in ALIKE.items()}


@lru_cache(maxsize=16)
def _index(folder: Path, version: int) -> DocumentIndex:
    return DocumentIndex(folder)


def open_index(folder: Path) -> DocumentIndex:
    """The index of a document, kept for the next call while its manifest is the same."""
    return _index(folder, (folder / "manifest.json").stat().st_mtime_ns)


def locate(folder: Path, text: str, *, limit: int = 20) -> list[Place]:
    """Places of `text` in the document in `folder`, in document order; empty if it stands nowhere."""
    return open_index(folder).find(text, limit=limit)


def verify_quote(folder: Path, quote: str) -> Place | None:
    """The first place of a quote, None if it isn't there. Ellipses split it: all parts must stand, in order."""
    index = open_index(folder)
    parts = [p.strip() for p in re.split(r"\s*(?:\[?\.{3,}\]?|\[?…\]?)\s*", quote.strip(" \t\n\"“”„«»'")) if p.strip()]
    places: list[Place] = []
    for part in parts:
        after = places[-1].token_start if places else -1
        found = next((p for p in index.find(part, limit=50) if p.token_start >= after), None)
        if found is None:
            return None
        places.append(found)
    return places[0] if places else None


def cite(folder: Path, answer_text: str) -> list[Citation]:
    """Citations of an answer, in its order and without overlaps: spans quoted, code-like or verbatim that the document
    holds."""
    index = open_index(folder)
    out: list[Citation] = []
    tried = 0
    for start, end, quote in _candidates(answer_text):
        if any(start < c.end and end > c.start for c in out):
            continue
        tried += 1
        if tried > MAX_CANDIDATES:
            break
        places = index.find(quote, limit=1)
        if places:
            out.append(Citation(start, end, quote, places[0]))
    return sorted(out, key=lambda c: c.start)


def _candidates(answer: str) -> Iterator[tuple[int, int, str]]:
    """Spans that may be quotes, the surest first."""
    for found in QUOTED.finditer(answer):
        group = next(i for i in range(1, 7) if found.group(i) is not None)
        quote = found.group(group).strip().strip(".,;…")
        if len(quote) >= (3 if group == 6 else MIN_QUOTE_CHARS) and quote:
            at = found.start(group) + found.group(group).find(quote)
            yield at, at + len(quote), quote
    for found in CODE_LIKE.finditer(answer):
        quote = found.group().rstrip(".,")
        if len(quote) >= 4:
            yield found.start(), found.start() + len(quote), quote
    for found in SENTENCE.finditer(answer):
        quote = found.group().strip().strip('"“”*-•> ').rstrip(".!?")
        if quote.count(" ") + 1 >= MIN_SENTENCE_WORDS:
            at = found.start() + found.group().find(quote)
            yield at, at + len(quote), quote
