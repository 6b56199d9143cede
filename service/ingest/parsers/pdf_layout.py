"""Runs of a page → lines in reading order: columns one after the other, tables row by row.

Reading follows the geometry, not the order in which a program drew: a recursive cut at gutters in the manner of XY-cut
(Nagy and Seth 1984), where a gutter counts only between two stretches of running prose.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from service.ingest.parsers.pdf_chars import Run

SAME_LINE = 0.5  # of the smaller height, between the middles of two runs
WIDE_GAP = 1.5  # in heights: cells of a row
PARAGRAPH_GAP = 1.6  # in line pitches
MIN_COLUMN_RUNS = 4
MIN_WORDS_PER_RUN = 3.0
MIN_FILL = 0.45  # mean width of a column's runs, of the column
# Three columns and more look like a table: they have longer lines, and gutters that are narrow beside them.
MIN_WORDS_OF_MANY, MIN_FILL_OF_MANY, MAX_GUTTER = 4.0, 0.6, 0.2
MIN_OVERLAP = 0.5  # of the two columns' heights
MAX_DEPTH = 4
# A clause number drawn right before its text, without a space of its own.
NUMBER_GLUED = re.compile(r"^(\(?\d{1,3}(?:\.\d{1,3})+\.?)(?=[A-Z][a-z])")
MAX_RUNS = 6000  # of one page; beyond, order by position only


@dataclass
class Line:
    runs: list[Run] = field(default_factory=list)
    y0: float = 0.0
    y1: float = 0.0
    blank_before: bool = False

    @property
    def middle(self) -> float:
        return (self.y0 + self.y1) / 2

    @property
    def height(self) -> float:
        return self.y1 - self.y0

    def text(self) -> str:
        parts = [self.runs[0].text]
        for before, run in pairwise(self.runs):
            gap = run.x0 - before.x1
            parts.append("  " if gap > WIDE_GAP * max(run.height, 4.0) else " " if gap > 0.08 * run.height else "")
            parts.append(run.text)
        return NUMBER_GLUED.sub(r"\1 ", "".join(parts).strip())


def lines_in_order(runs: Sequence[Run]) -> list[Line]:
    """Lines of one writing direction in reading order, `blank_before` where a new paragraph or block begins."""
    lines = _lines(runs)
    ordered = lines if len(runs) > MAX_RUNS else _read(lines, 0)
    pitches = [a.middle - b.middle for a, b in pairwise(ordered) if 0 < a.middle - b.middle < 60]
    pitch = median(pitches) if pitches else 12.0
    for before, line in pairwise(ordered):
        step = before.middle - line.middle
        line.blank_before = step < -0.5 * pitch or step > PARAGRAPH_GAP * max(pitch, 0.8 * line.height)
    return ordered


def _lines(runs: Sequence[Run]) -> list[Line]:
    """Runs whose middles are level form a line, top to bottom."""
    lines: list[Line] = []
    for run in sorted(runs, key=lambda r: (-r.middle, r.x0)):
        line = next((x for x in reversed(lines[-3:]) if _is_level(x, run)), None)
        if line is None:
            lines.append(Line([run], run.y0, run.y1))
        else:
            line.runs.append(run)
            # A superscript or a tall bracket must not widen what counts as this line.
            if run.height > line.height and len(run.text) > 3:
                line.y0, line.y1 = run.y0, run.y1
    for line in lines:
        line.runs.sort(key=lambda r: r.x0)
    return lines


def _is_level(line: Line, run: Run) -> bool:
    if abs(line.middle - run.middle) > SAME_LINE * max(min(line.height, run.height), 1.0):
        return False
    # Text printed over text (a shadow, a fake bold, a filled-in form) stays apart.
    return all(
        min(run.x1, r.x1) - max(run.x0, r.x0) < 0.6 * min(run.x1 - run.x0, r.x1 - r.x0) or run.text == r.text
        for r in line.runs
    )


def _read(lines: list[Line], depth: int) -> list[Line]:
    if depth >= MAX_DEPTH or len(lines) < MIN_COLUMN_RUNS:
        return lines
    found = _find_columns(lines)
    if found is None:
        return lines
    first, last, gutter = found
    left, right = _split(lines[first:last], gutter)
    return [*lines[:first], *_read(left, depth + 1), *_read(right, depth + 1), *_read(lines[last:], depth)]


def _split(lines: Sequence[Line], gutter: float) -> tuple[list[Line], list[Line]]:
    runs = [run for line in lines for run in line.runs]
    return _lines([r for r in runs if r.x1 <= gutter]), _lines([r for r in runs if r.x0 >= gutter])


def _find_columns(lines: Sequence[Line]) -> tuple[int, int, float] | None:
    """(first line, behind the last, x of the gutter) of the first stretch that reads in columns."""
    candidates: Counter[int] = Counter()
    for line in lines:
        for a, b in pairwise(line.runs):
            if b.x0 - a.x1 > 4:
                candidates[round((a.x1 + b.x0) / 2 / 6)] += 1
        # Columns whose lines are not level show in lines that end or begin near the middle.
        if len(line.runs) == 1:
            candidates[round((line.runs[0].x0 - 6) / 6)] += 1
    best: tuple[int, int, float] | None = None
    for cell, _ in candidates.most_common(12):
        found = _stretch(lines, cell * 6.0)
        if found is not None and (best is None or found[1] - found[0] > best[1] - best[0]):
            best = (*found, cell * 6.0)
    return best


def _stretch(lines: Sequence[Line], x: float) -> tuple[int, int] | None:
    """The longest run of lines that no run crosses at `x` and that is prose on both sides."""
    best: tuple[int, int] | None = None
    start = 0
    for index in range(len(lines) + 1):
        crossed = index == len(lines) or any(run.x0 < x < run.x1 for run in lines[index].runs)
        if not crossed:
            continue
        trimmed = _trim(lines, start, index, x)
        if trimmed is not None and (best is None or trimmed[1] - trimmed[0] > best[1] - best[0]):
            best = trimmed
        start = index + 1
    return best


def _trim(lines: Sequence[Line], start: int, end: int, x: float) -> tuple[int, int] | None:
    """Without what lies wholly above or below one of the two columns, if it is columns at all."""
    rights = [i for i in range(start, end) if any(r.x0 >= x for r in lines[i].runs)]
    lefts = [i for i in range(start, end) if any(r.x1 <= x for r in lines[i].runs)]
    if len(rights) < MIN_COLUMN_RUNS or len(lefts) < MIN_COLUMN_RUNS:
        return None
    first = max(lefts[0], rights[0])
    # A column's heading may stand above the first level line of the other column.
    while first > start and lines[first - 1].middle - lines[first].middle < 2 * lines[first].height:
        first -= 1
    last = end
    bottom = min(lefts[-1], rights[-1])
    for i in range(bottom + 1, end):
        if lines[i - 1].middle - lines[i].middle > 2.2 * lines[i].height:
            last = i
            break
    left = [r for line in lines[first:last] for r in line.runs if r.x1 <= x]
    right = [r for line in lines[first:last] for r in line.runs if r.x0 >= x]
    if not (_is_prose(left) and _is_prose(right)):
        return None
    shared = min(max(r.y1 for r in left), max(r.y1 for r in right)) - max(
        min(r.y0 for r in left), min(r.y0 for r in right)
    )
    shorter = min(max(r.y1 for r in side) - min(r.y0 for r in side) for side in (left, right))
    return (first, last) if shared > MIN_OVERLAP * max(shorter, 1.0) else None


def _is_prose(runs: Sequence[Run]) -> bool:
    """One column of running text, or several beside one another. Cells of a table are shorter, or far apart."""
    columns = _columns(runs)
    if len(columns) == 1:
        return _is_column(runs, MIN_WORDS_PER_RUN, MIN_FILL)
    narrow = all(_left(b) - _right(a) <= MAX_GUTTER * (_right(a) - _left(a)) for a, b in pairwise(columns))
    return narrow and all(_is_column(column, MIN_WORDS_OF_MANY, MIN_FILL_OF_MANY) for column in columns)


def _columns(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups of runs whose extents from left to right touch, from left to right."""
    columns: list[list[Run]] = []
    reached = float("-inf")
    for run in sorted(runs, key=lambda r: r.x0):
        if run.x0 > reached:
            columns.append([])
        columns[-1].append(run)
        reached = max(reached, run.x1)
    return columns


def _left(runs: Sequence[Run]) -> float:
    return min(run.x0 for run in runs)


def _right(runs: Sequence[Run]) -> float:
    return max(run.x1 for run in runs)


def _is_column(runs: Sequence[Run], min_words: float, min_fill: float) -> bool:
    if len(runs) < MIN_COLUMN_RUNS:
        return False
    words = sum(r.text.count(" ") + 1 for r in runs) / len(runs)
    fill = sum(r.x1 - r.x0 for r in runs) / len(runs) / max(_right(runs) - _left(runs), 1.0)
    digits = sum(c.isdigit() for r in runs for c in r.text)
    letters = sum(c.isalpha() for r in runs for c in r.text)
    return words >= min_words and fill >= min_fill and letters > 4 * digits
