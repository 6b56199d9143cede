"""Automatic numbers of Word paragraphs: they exist only as rules, and cross-references need them (ECMA-376, 17.9)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
MAX_STYLE_DEPTH = 20
BULLET = "•"


@dataclass
class Level:
    start: int = 1
    format: str = "decimal"
    text: str = ""
    restart: int | None = None  # restarts after a number of this level (1-based); 0: never
    legal: bool = False
    style: str | None = None


@dataclass
class _List:
    abstract: str
    start_overrides: dict[int, int] = field(default_factory=dict)
    levels: dict[int, Level] = field(default_factory=dict)


class Numbering:
    """Gives each paragraph its number, in document order."""

    def __init__(self, numbering: Any | None, styles: Any | None) -> None:
        self._abstract: dict[str, dict[int, Level]] = {}
        self._lists: dict[str, _List] = {}
        self._style_of_list: dict[str, str] = {}  # abstract list → style that numbers it elsewhere
        self._counters: dict[str, list[int | None]] = {}
        self._started: set[tuple[str, int]] = set()
        self._styles: dict[str, tuple[str | None, str | None, int | None]] = {}
        if numbering is not None:
            self._read_lists(numbering)
        if styles is not None:
            self._read_styles(styles)

    def _read_lists(self, root: Any) -> None:
        for abstract in root.iter(f"{W}abstractNum"):
            key = abstract.get(f"{W}abstractNumId")
            self._abstract[key] = {int(x.get(f"{W}ilvl", "0")): _level(x) for x in abstract.iterfind(f"{W}lvl")}
            link = abstract.find(f"{W}numStyleLink")
            if link is not None:
                self._style_of_list[key] = link.get(f"{W}val")
        for number in root.iter(f"{W}num"):
            reference = number.find(f"{W}abstractNumId")
            if reference is None:
                continue
            item = _List(reference.get(f"{W}val"))
            for override in number.iterfind(f"{W}lvlOverride"):
                at = int(override.get(f"{W}ilvl", "0"))
                start = override.find(f"{W}startOverride")
                if start is not None:
                    item.start_overrides[at] = _int(start.get(f"{W}val"), 1)
                level = override.find(f"{W}lvl")
                if level is not None:
                    item.levels[at] = _level(level)
            self._lists[number.get(f"{W}numId")] = item

    def _read_styles(self, root: Any) -> None:
        for style in root.iter(f"{W}style"):
            based = style.find(f"{W}basedOn")
            properties = style.find(f"{W}pPr")
            number, at = _reference(properties)
            self._styles[style.get(f"{W}styleId")] = (None if based is None else based.get(f"{W}val"), number, at)

    def of(self, properties: Any | None) -> str:
        """The number of the paragraph with these properties (w:pPr), as Word prints it; '' without one."""
        number, at = _reference(properties)
        style = None if properties is None else properties.find(f"{W}pStyle")
        name = None if style is None else style.get(f"{W}val")
        if number is None and name is not None:
            number, inherited = self._of_style(name)
            at = inherited if at is None else at
        item = self._lists.get(number or "")
        if item is None:
            return ""
        levels = self._levels(item)
        if at is None:
            at = next((i for i, level in levels.items() if name is not None and level.style == name), 0)
        return self._next(number or "", item, levels, at)

    def _of_style(self, name: str) -> tuple[str | None, int | None]:
        at: int | None = None
        for _ in range(MAX_STYLE_DEPTH):
            if name not in self._styles:
                break
            based, number, level = self._styles[name]
            at = level if at is None else at
            if number is not None:
                return number, at
            if based is None:
                break
            name = based
        return None, at

    def _levels(self, item: _List) -> dict[int, Level]:
        levels = self._abstract.get(item.abstract, {})
        if not levels and item.abstract in self._style_of_list:
            number, _ = self._of_style(self._style_of_list[item.abstract])
            linked = self._lists.get(number or "")
            levels = self._abstract.get(linked.abstract, {}) if linked else {}
        return {**levels, **item.levels}

    def _next(self, number: str, item: _List, levels: dict[int, Level], at: int) -> str:
        level = levels.get(at)
        if level is None:
            return ""
        counters = self._counters.setdefault(item.abstract, [None] * 10)
        if at in item.start_overrides and (number, at) not in self._started:
            counters[at] = item.start_overrides[at]
        else:
            current = counters[at]
            counters[at] = level.start if current is None else current + 1
        self._started.add((number, at))
        for deeper in range(at + 1, 10):
            below = levels.get(deeper)
            if below is None or below.restart is None or (below.restart > 0 and at < below.restart):
                counters[deeper] = None
        if level.format == "bullet":
            return BULLET
        return _print(level, levels, counters)


def _print(level: Level, levels: dict[int, Level], counters: list[int | None]) -> str:
    out = level.text
    for index in range(9, 0, -1):
        mark = f"%{index}"
        if mark in out:
            other = levels.get(index - 1, Level())
            value = counters[index - 1]
            form = "decimal" if level.legal and other.format not in ("none",) else other.format
            out = out.replace(mark, format_number(other.start if value is None else value, form))
    return out.strip()


def _level(element: Any) -> Level:
    def value(tag: str) -> str | None:
        found = element.find(f"{W}{tag}")
        return None if found is None else found.get(f"{W}val")

    legal = element.find(f"{W}isLgl")
    restart = value("lvlRestart")
    return Level(
        start=_int(value("start"), 1),
        format=value("numFmt") or "decimal",
        text=value("lvlText") or "",
        restart=None if restart is None else _int(restart, 0),
        legal=legal is not None and legal.get(f"{W}val", "1") not in ("0", "false"),
        style=value("pStyle"),
    )


def _reference(properties: Any | None) -> tuple[str | None, int | None]:
    found = None if properties is None else properties.find(f"{W}numPr")
    if found is None:
        return None, None
    number, level = found.find(f"{W}numId"), found.find(f"{W}ilvl")
    return (
        None if number is None else number.get(f"{W}val"),
        None if level is None else min(max(_int(level.get(f"{W}val"), 0), 0), 9),
    )


def _int(value: str | None, default: int) -> int:
    try:
        return int(value or default)
    except ValueError:
        return default


def format_number(value: int, form: str) -> str:
    """`value` in one of Word's number formats; an unknown one comes out decimal."""
    formatter = FORMATS.get(form)
    return formatter(value) if formatter else str(value)


def _letters(value: int) -> str:
    # Word doubles letters: z, aa, bb.
    return chr(ord("a") + (value - 1) % 26) * ((value - 1) // 26 + 1) if 0 < value < 1000 else str(value)


def _roman(value: int) -> str:
    if not 0 < value < 4000:
        return str(value)
    out = ""
    for number, letters in ROMAN:
        while value >= number:
            out, value = out + letters, value - number
    return out


ROMAN_LETTERS = ("m", "cm", "d", "cd", "c", "xc", "l", "xl", "x", "ix", "v", "iv", "i")
ROMAN = tuple(zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1), ROMAN_LETTERS, strict=True))
ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}


def _cardinal(value: int) -> str:
    if 0 <= value < 20:
        return ONES[value].capitalize()
    if 20 <= value < 100:
        return (TENS[value // 10] + (f"-{ONES[value % 10]}" if value % 10 else "")).capitalize()
    return str(value)


def _ordinal_word(value: int) -> str:
    words = _cardinal(value).lower()
    if words.isdigit():
        return _ordinal(value)
    stem, dash, last = words.rpartition("-")
    last = last[:-1] + "ieth" if last.endswith("y") else ORDINALS.get(last, last + "th")
    return (stem + dash + last).capitalize()


def _ordinal(value: int) -> str:
    suffix = "th" if 10 <= value % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th")
    return f"{value}{suffix}"


FORMATS: dict[str, Callable[[int], str]] = {
    "decimal": str,
    "decimalZero": lambda v: f"{v:02d}",
    "lowerLetter": _letters,
    "upperLetter": lambda v: _letters(v).upper(),
    "lowerRoman": _roman,
    "upperRoman": lambda v: _roman(v).upper(),
    "ordinal": _ordinal,
    "ordinalText": _ordinal_word,
    "cardinalText": _cardinal,
    "bullet": lambda v: BULLET,
    "none": lambda v: "",
}
