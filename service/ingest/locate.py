"""From words back to their place: which file, page, line and tokens a passage of a document stands in.

    locate(folder, text) → list[Place]      exact match first, then one that forgives white space, quotes and page
                                            marks, last one that forgives hyphens at line ends too
    cite(folder, answer_text) → list[Citation]    quoted and code-like spans of an answer that stand in the document
    verify_quote(folder, quote) → Place | None    for quotes that a summary claims to have taken from it

`folder` is what an ingest wrote. Free of torch and of the tokenizer: the index is offsets.npy (the byte of document.txt
at which each token begins), memory-mapped; a document of a million tokens answers in milliseconds.
"""

import json
import mmap
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_QUOTE_CHARS = 4000
MAX_CANDIDATES = 200
MIN_QUOTE_CHARS = 8
MIN_SENTENCE_WORDS = 7
# What an ellipsis in a quote may leave out; parts further apart are no longer one passage.
MAX_ELISION_TOKENS = 1000
MIN_PART_CHARS = 8
QUOTATION_MARKS = " \t\n\"“”„«»'‘’"

# Between two words of a passage: white space, or what stands between pages.
GAP = rb"(?:\s|\xc2\xa0|\[(?:page|slide|sheet|chapter) [^\]\n]{1,200}\]\n)+"
# Within a word: a soft hyphen, or a hyphen at a line's end.
BREAK = rb"(?:\xc2\xad|(?:-|\xe2\x80\x90)[ \t]*\r?\n\s*)?"
BROKEN_WORD = re.compile(r"(?<=\w)[-\u2010\u00ad]\s*(?=\w)")
MAYBE_BROKEN = "\0"
CHUNK_CHARS = 200
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

    def find(self, text: str, *, limit: int = 20, broken_words: bool = True) -> list[Place]:
        """Places of `text`, at most `limit`, in document order; those inside files only.

        `broken_words` forgives hyphens at line ends, in the text or the document: the slowest of the searches.
        """
        text = text.strip()[:MAX_QUOTE_CHARS].replace(MAYBE_BROKEN, "")
        if not text:
            return []
        found = self._places(self._exact(text.encode("utf-8", "replace")), limit)
        found = found or self._places(self._forgiving(text), limit)
        if not found and broken_words:
            found = self._places(self._unbroken(text), limit)
        return found

    def _exact(self, needle: bytes) -> Iterator[tuple[int, int]]:
        at = self._text.find(needle)
        while at >= 0:
            yield at, at + len(needle)
            at = self._text.find(needle, at + 1)

    def _forgiving(self, text: str) -> Iterator[tuple[int, int]]:
        words = [_forgiving_word(word) for word in text.split()]
        for found in re.finditer(GAP.join(words), self._text):
            yield found.start(), found.end()

    def _unbroken(self, text: str) -> Iterator[tuple[int, int]]:
        first, *rest = _chunks(BROKEN_WORD.sub(MAYBE_BROKEN, text).split())
        for found in re.finditer(_unbroken_words(first), self._text):
            end = found.end()
            for chunk in rest:
                goes_on = re.compile(GAP + _unbroken_words(chunk)).match(self._text, end)
                if goes_on is None:
                    break
                end = goes_on.end()
            else:
                yield found.start(), end

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
    return b"".join(map(_forgiving_char, word))


def _forgiving_char(char: str) -> bytes:
    return (ALIKE_GROUPS.get(char) or re.escape(char)).encode("utf-8", "replace")


def _chunks(words: Sequence[str]) -> list[list[str]]:
    """Words in groups of at most CHUNK_CHARS characters: one expression for a whole long quote is slow to compile."""
    chunks: list[list[str]] = [[]]
    for word in words:
        if chunks[-1] and sum(map(len, chunks[-1])) + len(word) > CHUNK_CHARS:
            chunks.append([])
        chunks[-1].append(word)
    return chunks


def _unbroken_words(words: Sequence[str]) -> bytes:
    return GAP.join(map(_unbroken_word, words))


def _unbroken_word(word: str) -> bytes:
    """A word that may be broken between any two characters. Never two runs of white space in a row, which would take
    quadratic time."""
    parts = (BREAK.join(map(_forgiving_char, part)) for part in word.split(MAYBE_BROKEN))
    return rb"(?:-|\xe2\x80\x90|\xc2\xad)?\s*".join(parts)


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
    """The first place of a quote, None if it isn't there.

    Ellipses split it: all parts must stand in one file, in order, not more than MAX_ELISION_TOKENS apart, and none may
    be so short that it stands anywhere.
    """
    index = open_index(folder)
    parts = [p for p in re.split(r"\s*(?:\[?\.{3,}\]?|\[?…\]?)\s*", quote.strip(QUOTATION_MARKS)) if p.strip()]
    if not parts or (len(parts) > 1 and min(len(part.strip()) for part in parts) < MIN_PART_CHARS):
        return None
    first, *rest = (index.find(part, limit=MAX_CANDIDATES) for part in parts)
    for start in first:
        last: Place | None = start
        for places in rest:
            last = next((p for p in places if last is not None and _goes_on(last, p)), None)
        if last is not None:
            return replace(start, token_end=max(start.token_end, last.token_end))
    return None


def _goes_on(before: Place, behind: Place) -> bool:
    return behind.file == before.file and 0 <= behind.token_start - before.token_end + 1 <= MAX_ELISION_TOKENS


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
        places = index.find(quote, limit=1, broken_words=False)
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
