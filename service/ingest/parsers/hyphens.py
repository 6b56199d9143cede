"""Words broken at a line's end: joined where a printer broke them, left where the hyphen belongs to the word."""

import re
from collections.abc import Iterable

HYPHENS = ("-", "\u2010", "\x02", "\ufffe")
WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
PLAIN = str.maketrans("\x02\ufffe", "--")
BROKEN = re.compile(r"([^\W\d_]+(?:-[^\W\d_]+)*)[-\u2010\x02\ufffe]$")
BEGINS = re.compile(r"^([^\W\d_]+)")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# First parts that take a hyphen whatever follows, and those that do before the words of such compounds.
ALWAYS_HYPHENATING = _words("third non self well ex arm's quasi bona vis")
HYPHENATING = _words("""
    co pre post first second long short high low full part multi cross anti semi half fair hard right tax year month day
    week time one two three four five six seven eight nine ten twenty thirty forty fifty sixty seventy eighty ninety
    follow sub single double lump market money work start state in on off out up down by re all
    """)
COMPOUND_SECONDS = _words("""
    party parties term terms known based being owned owner owners related time day days year years month months
    week level wide site house line free up off out down over end ended in performing performance payment payments
    compete exclusive tax party's parties' sum share stock quarter quarters half third thirds fourth fourths one
    two three four five six seven eight nine bearing value date dated way sided forma rata defined described
    established made
    """)


class Hyphenation:
    """Decides with the document's own words (a fixed span of it, so that the answer is always the same)."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._words: set[str] = set()
        self._compounds: set[str] = set()
        goes_on = False
        for line in lines:
            # Halves of broken words are no words.
            whole = BEGINS.sub("", line, count=1) if goes_on else line
            goes_on = line.endswith(HYPHENS)
            for word in WORD.findall((BROKEN.sub("", whole) if goes_on else whole).lower()):
                (self._compounds if "-" in word else self._words).add(word)

    def join(self, lines: list[str]) -> list[str]:
        """The lines with words made whole; the second half moves up to the first, so that lines stay lines."""
        out = list(lines)
        for at in range(len(out) - 1):
            broken = BROKEN.search(out[at]) if out[at].endswith(HYPHENS) else None
            begins = BEGINS.match(out[at + 1]) if broken else None
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
        return [line.translate(PLAIN) for line in out]

    def _keeps(self, first: str, second: str) -> bool:
        stem = first.rpartition("-")[2]
        if first + second in self._words or stem + second in self._words:
            return False
        if f"{first}-{second}" in self._compounds:
            return True
        if stem in ALWAYS_HYPHENATING or "-" in first:
            return True
        if stem in HYPHENATING:
            return second in COMPOUND_SECONDS
        return len(stem) > 3 and len(second) > 3 and stem in self._words and second in self._words
