"""A document's own text again: a passage by its tokens, or the lines of a file, with what stands around them.

`folder` is what an ingest wrote. Only the bytes asked for are read: document.txt and offsets.npy are memory-mapped.
"""

import json
import mmap
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 8192
MAX_LINES = 1000
# A line of minified code would bring its whole file along.
MAX_CONTEXT_BYTES = 32 * 1024
MAX_LINES_BYTES = 256 * 1024
_CHUNK_BYTES = 64 * 1024


class OutsideDocument(ValueError):
    """No file of the document holds that: what was asked for, and what there is."""


@dataclass(frozen=True)
class Passage:
    """`text` between `before` and `after`, all of one file (one page, where it has pages).

    `line` counts from 1 and is that of `text`'s first character, `first_line` that of `before`'s. Tokens [token_start,
    token_end) cover `text`. `more`: the file (the page) goes on behind `after`.
    """

    file: str
    page: int | None
    page_label: str | None
    first_line: int
    line: int
    before: str
    text: str
    after: str
    token_start: int
    token_end: int
    more: bool


@dataclass(frozen=True)
class _Part:
    """A file, or a page of it, by tokens."""

    file: str
    page: int | None
    label: str | None
    start: int
    end: int
    pages: tuple["_Part", ...] = ()


class _Text:
    def __init__(self, folder: Path) -> None:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
        self._files = {row["path"]: _file(row) for row in manifest["files"] if row.get("status") == "included"}
        # A duplicate's tokens are those of the file it repeats.
        copies = {row["path"] for row in manifest["files"] if row.get("duplicate_of")}
        self._parts = sorted(
            (part for path, part in self._files.items() if path not in copies), key=lambda part: part.start
        )
        self._starts = [part.start for part in self._parts]
        self._offsets: NDArray[np.uint64] = np.load(folder / "offsets.npy", mmap_mode="r")
        with open(folder / "document.txt", "rb") as file:
            size = (folder / "document.txt").stat().st_size
            self._bytes: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""

    def passage(self, start: int, end: int, context_lines: int) -> Passage:
        part = self._part_at(start)
        first, last = self._span(part)
        # A token may begin or end within a character.
        a = self._character(int(self._offsets[start]), first, -1)
        b = self._character(int(self._offsets[min(end, part.end)]), last, 1)
        top = self._lines_before(a, first, context_lines)
        bottom = self._lines_after(b, min(last, b + MAX_CONTEXT_BYTES), context_lines)
        return self._show(part, top, a, b, bottom, (start, min(end, part.end)))

    def lines(self, file: str, page: int | None, line: int, count: int) -> Passage:
        part = self._part_of(file, page)
        first, last = self._span(part)
        a = self._line_start(first, last, line)
        if a is None:
            raise OutsideDocument(f"{file} has fewer than {line} lines")
        b = self._lines_after(a, min(last, a + MAX_LINES_BYTES), count - 1)
        tokens = np.searchsorted(self._offsets[part.start : part.end + 1], [a, b], side="left")
        start = part.start + max(0, int(tokens[0]))
        return self._show(part, a, a, b, b, (start, part.start + int(tokens[1])))

    def _show(self, part: _Part, top: int, a: int, b: int, bottom: int, tokens: tuple[int, int]) -> Passage:
        first, last = self._span(part)
        first_line = 1 + self._newlines(first, top)
        return Passage(
            file=part.file,
            page=part.page,
            page_label=part.label,
            first_line=first_line,
            line=first_line + self._newlines(top, a),
            before=self._decode(top, a),
            text=self._decode(a, b),
            after=self._decode(b, bottom),
            token_start=tokens[0],
            token_end=tokens[1],
            more=bottom < last,
        )

    def _part_at(self, token: int) -> _Part:
        at = bisect_right(self._starts, token) - 1
        if at < 0 or token >= self._parts[at].end:
            raise OutsideDocument(f"token {token} is in no file of this document")
        whole = self._parts[at]
        return next((page for page in whole.pages if page.start <= token < page.end), whole)

    def _part_of(self, file: str, page: int | None) -> _Part:
        whole = self._files.get(file)
        if whole is None:
            raise OutsideDocument(f"the document holds no text of a file {file!r}")
        if page is None:
            return whole
        found = next((part for part in whole.pages if part.page == page), None)
        if found is None:
            raise OutsideDocument(f"{file!r} has no page {page}")
        return found

    def _span(self, part: _Part) -> tuple[int, int]:
        return int(self._offsets[part.start]), int(self._offsets[part.end])

    def _decode(self, start: int, end: int) -> str:
        return bytes(self._bytes[start:end]).decode("utf-8", "replace")

    def _character(self, at: int, limit: int, step: int) -> int:
        while at != limit and at < len(self._bytes) and self._bytes[at] & 0xC0 == 0x80:
            at += step
        return at

    def _newlines(self, start: int, end: int) -> int:
        return sum(self._bytes[at : min(at + _CHUNK_BYTES, end)].count(b"\n") for at in range(start, end, _CHUNK_BYTES))

    def _lines_before(self, at: int, limit: int, count: int) -> int:
        """Where the line begins that is `count` lines above the one of `at`."""
        limit = max(limit, at - MAX_CONTEXT_BYTES)
        for _ in range(count + 1):
            newline = self._bytes.rfind(b"\n", limit, at)
            if newline < 0:
                return self._character(limit, at, 1)
            at = newline
        return at + 1

    def _lines_after(self, at: int, limit: int, count: int) -> int:
        """Behind the end of the line that is `count` lines below the one of `at`."""
        for _ in range(count + 1):
            newline = self._bytes.find(b"\n", at, limit)
            if newline < 0:
                return self._character(limit, at, -1)
            at = newline + 1
        return at

    def _line_start(self, at: int, limit: int, line: int) -> int | None:
        for _ in range(line - 1):
            newline = self._bytes.find(b"\n", at, limit)
            if newline < 0:
                return None
            at = newline + 1
        return at


def _file(row: dict[str, Any]) -> _Part:
    pages = tuple(
        _Part(row["path"], page["page"], page.get("label"), page["token_start"], page["token_end"])
        for page in row.get("pages", ())
    )
    return _Part(row["path"], None, None, row["token_start"], row["token_end"], pages)


@lru_cache(maxsize=16)
def _open(folder: Path, version: int) -> _Text:
    return _Text(folder)


def _text(folder: Path) -> _Text:
    """Kept for the next call while the manifest is the same."""
    return _open(folder, (folder / "manifest.json").stat().st_mtime_ns)


def passage(folder: Path, start: int, end: int, *, context_lines: int) -> Passage:
    """The text of tokens [start, end), cut where its file (its page) ends. Raises OutsideDocument, OSError."""
    if not 0 <= start < end <= start + MAX_TOKENS:
        raise OutsideDocument(f"1 to {MAX_TOKENS} tokens are expected, got [{start}, {end})")
    return _text(folder).passage(start, end, context_lines)


def lines(folder: Path, file: str, *, page: int | None = None, line: int = 1, count: int) -> Passage:
    """`count` lines of a file (of a page, where lines count from its top). Raises OutsideDocument, OSError."""
    return _text(folder).lines(file, page, line, count)
