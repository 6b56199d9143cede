"""Words broken at a line's end: joined where a printer broke them, left where the hyphen belongs to the word."""

import re
from collections.abc import Iterable

WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
BROKEN = re.compile(r"([^\W\d_]+(?:-[^\W\d_]+)*)[-\u2010\x02\ufffe]$")
BEGINS = re.compile(r"^([^\W\d_]+)")
# First parts that take a hyphen in English legal and business prose.
HYPHENATING = frozenset(
    ["third", "first", "second", "self", "non", "co", "pre", "post", "well", "long", "short", "high", "low", "full", "part", "multi", "cross", "sub", "inter", "intra", "anti", "counter", "ex", "semi", "half", "quasi", "pro", "vice", "all", "on", "off", "in", "out", "up", "down", "by", "so", "then", "would", "built", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "arm's", "good", "bona", "de", "per", "pari", "year", "month", "day", "week", "time", "fair", "hard", "real", "right", "tax", "cost", "price", "cash", "stock", "share", "market", "world", "single", "double", "lump", "free", "state", "court", "government", "employer", "company", "client", "customer", "user", "data", "e"]
)
SUFFIXES = (
    "tion", "tions", "sion", "sions", "ment", "ments", "ing", "ings", "ed", "er", "ers", "ly", "ness", "able", "ible", "ance",
    "ances", "ence", "ences", "ity", "ities", "ous", "ive", "ives", "al", "als", "ally", "ate", "ates", "ated", "ant", "ants",
    "ent", "ents", "ular", "ture", "tures", "cation", "cations", "ization", "fication", "lar", "ing", "es", "ure", "ures", "ary", "ory",
)  # fmt: skip


class Hyphenation:
    """Decides with the document's own words (a fixed span of it, so that the answer is always the same)."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._words: set[str] = set()
        self._compounds: set[str] = set()
        for line in lines:
            for word in WORD.findall(line.lower()):
                (self._compounds if "-" in word else self._words).add(word)

    def join(self, lines: list[str]) -> list[str]:
        """The lines with words made whole; the second half moves up to the first, so that lines stay lines."""
        out = list(lines)
        for at in range(len(out) - 1):
            broken = BROKEN.search(out[at])
            begins = BEGINS.match(out[at + 1])
            if broken is None or begins is None:
                continue
            first, second = broken.group(1), begins.group(1)
            if not second[0].islower():
                if out[at][-1] in "\x02\ufffe":  # a name in two parts: the hyphen is real
                    out[at] = out[at][:-1] + "-"
                continue
            word = f"{first}-{second}" if self._keeps(first.lower(), second.lower()) else first + second
            rest = out[at + 1][len(second) :]
            taken = re.match(r"[^\s\w]*(?=\s|$)", rest)  # the comma behind the word comes along
            tail = taken.group() if taken else ""
            out[at] = out[at][: broken.start(1)] + word + tail
            out[at + 1] = rest[len(tail) :].lstrip()
        return [line.replace("\x02", "-").replace("\ufffe", "-") for line in out]

    def _keeps(self, first: str, second: str) -> bool:
        stem = first.rpartition("-")[2]
        if first + second in self._words or stem + second in self._words:
            return False
        if f"{first}-{second}" in self._compounds:
            return True
        if second in SUFFIXES:
            return False
        if stem in HYPHENATING and (len(second) > 3 or second in self._words):
            return True
        return "-" in first or (len(stem) > 2 and len(second) > 2 and stem in self._words and second in self._words)
