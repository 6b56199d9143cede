"""Which files .gitignore rules leave out, by git's own rules (gitignore(5), wildmatch).

Own translation instead of a library's: git's answer depends on the order of levels, on excluded parents that nothing
below can bring back, and on corner cases of brackets and trailing spaces; tests hold it against real git.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from service.ingest.encodings import decode

MAX_RULE_CHARS = 4096
POSIX_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "\\x21-\\x7e",
    "lower": "a-z",
    "print": "\\x20-\\x7e",
    "punct": "!-/:-@\\[-`{-~",
    "space": " \\t\\n\\r\\f\\v",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


@dataclass(frozen=True)
class Rule:
    pattern: re.Pattern[str]
    negated: bool
    only_directories: bool
    by_name: bool  # no slash in it: matched against the last part at any depth


class IgnoreRules:
    """The rules of one tree. Directories are given as their parts joined by `/`, the root as ''."""

    def __init__(self) -> None:
        self._files: dict[str, list[Rule]] = {}
        self._ignored_directories: dict[str, bool] = {"": False}

    def add(self, directory: str, data: bytes) -> None:
        """Rules of the ignore file in `directory`; a byte order mark at its start is no part of the first rule."""
        text, _, _ = decode(data)
        rules = [rule for line in re.split(r"\n", text) if (rule := parse_rule(line)) is not None]
        if rules:
            self._files[directory] = self._files.get(directory, []) + rules
            self._ignored_directories = {"": False}

    def ignores_directory(self, path: str) -> bool:
        known = self._ignored_directories.get(path)
        if known is None:
            parent = path.rpartition("/")[0]
            known = self.ignores_directory(parent) or self._verdict(path, is_directory=True)
            self._ignored_directories[path] = known
        return known

    def ignores_file(self, path: str) -> bool:
        return self.ignores_directory(path.rpartition("/")[0]) or self._verdict(path, is_directory=False)

    def _verdict(self, path: str, *, is_directory: bool) -> bool:
        """The last matching rule of the deepest ignore file decides; its parents are known not to be ignored."""
        name = path.rpartition("/")[2]
        directory = path
        while directory:
            directory = directory.rpartition("/")[0]
            rules = self._files.get(directory)
            if not rules:
                continue
            relative = path[len(directory) + 1 :] if directory else path
            for rule in reversed(rules):
                if rule.only_directories and not is_directory:
                    continue
                if rule.pattern.fullmatch(name if rule.by_name else relative):
                    return not rule.negated
        return False


def parse_rule(line: str) -> Rule | None:
    """One line of an ignore file; None for blanks, comments and patterns that git can't match either."""
    line = line.removesuffix("\r") if not line.endswith("\\\r") else line
    if not line or line.startswith("#") or len(line) > MAX_RULE_CHARS:
        return None
    line = _strip_trailing_spaces(line)
    negated = line.startswith("!")
    if negated:
        line = line[1:]
    only_directories = line.endswith("/")
    if only_directories:
        line = line[:-1]
    by_name = "/" not in line
    line = line.removeprefix("/")
    if not line:
        return None
    expression = _translate(line, by_name=by_name)
    return Rule(expression, negated, only_directories, by_name) if expression else None


def _strip_trailing_spaces(line: str) -> str:
    """Unescaped spaces at the end don't count; tabs do."""
    end = len(line)
    while end and line[end - 1] == " ":
        slashes = len(line[: end - 1]) - len(line[: end - 1].rstrip("\\"))
        if slashes % 2:
            break
        end -= 1
    return line[:end]


@lru_cache(maxsize=8192)
def _translate(pattern: str, *, by_name: bool) -> re.Pattern[str] | None:
    """Git's wildmatch with WM_PATHNAME as a regular expression over a whole path; None: it can't match anything.

    Every star but the last is an atomic group that takes the earliest match of what follows it: as good as any later
    one, and matching stays polynomial whatever the pattern.
    """
    tokens = _tokens(pattern)
    if tokens is None:
        return None
    wild = [i for i, token in enumerate(tokens) if token in (STAR, DIRECTORIES)]
    last_directories = max((i for i in wild if tokens[i] == DIRECTORIES), default=-1)
    out: list[str] = []
    star_open = directories_open = False
    for index, token in enumerate(tokens):
        if token in (STAR, DIRECTORIES) and star_open:
            out.append(")")
            star_open = False
        if token == DIRECTORIES:
            out.append(")" if directories_open else "")
            directories_open = index != last_directories
            out.append("(?>(?:[^/]+/)*?" if directories_open else "(?:[^/]+/)*")
        elif token == STAR:
            star_open = index != wild[-1]
            out.append("(?>[^/]*?" if star_open else "[^/]*")
        else:
            out.append(token)
    try:
        return re.compile("".join(out), re.DOTALL)
    except (re.error, OverflowError, RecursionError):
        return None


STAR, DIRECTORIES = "*", "**/"


def _tokens(pattern: str) -> list[str] | None:
    """Regular expressions of single characters, with STAR and DIRECTORIES between them."""
    out: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "*":
            at = _star(pattern, at, out)
        elif char == "?":
            out.append("[^/]")
            at += 1
        elif char == "[":
            bracket, at = _bracket(pattern, at)
            if bracket is None:
                return None
            out.append(bracket)
        elif char == "\\":
            if at + 1 >= len(pattern):
                return None
            out.append(re.escape(pattern[at + 1]))
            at += 2
        else:
            out.append(re.escape(char))
            at += 1
    return out


def _star(pattern: str, at: int, out: list[str]) -> int:
    stop = at
    while stop < len(pattern) and pattern[stop] == "*":
        stop += 1
    before = at == 0 or pattern[at - 1] == "/"
    if stop - at == 2 and before and stop == len(pattern):
        out.append(".+" if at else ".*")
    elif stop - at == 2 and before and pattern.startswith(("/", "\\/"), stop):
        if not out or out[-1] != DIRECTORIES:
            out.append(DIRECTORIES)
        stop += 2 if pattern[stop] == "\\" else 1
    elif not out or out[-1] != STAR:
        out.append(STAR)
    return stop


def _bracket(pattern: str, at: int) -> tuple[str | None, int]:
    """A bracket expression from `pattern[at] == "["`. Unclosed: (None, …), git lets it match nothing."""
    at += 1
    negated = pattern[at : at + 1] in ("!", "^") and pattern[at : at + 1] != ""
    if negated:
        at += 1
    items: list[str] = []
    first = True
    previous: str | None = None
    while True:
        if at >= len(pattern):
            return None, at
        char = pattern[at]
        if char == "]" and not first:
            break
        first = False
        if char == "[" and pattern[at + 1 : at + 2] == ":":
            close = pattern.find("]", at + 2)
            if close < 0:
                return None, at
            if close - 1 > at + 1 and pattern[close - 1] == ":":
                name = pattern[at + 2 : close - 1]
                if name not in POSIX_CLASSES:
                    return None, at
                items.append(POSIX_CLASSES[name])
                previous, at = None, close + 1
                continue
            # No closing ":]": the bracket is an ordinary character.
        if char == "-" and previous is not None and pattern[at + 1 : at + 2] not in ("", "]"):
            at += 1
            high = pattern[at]
            if high == "\\":
                at += 1
                if at >= len(pattern):
                    return None, at
                high = pattern[at]
            items.pop()
            if previous <= high:
                items.append(f"{_literal(previous)}-{_literal(high)}")
            else:
                items.append(_literal(previous))  # git has compared the low end by itself already
            previous = None
            at += 1
            continue
        if char == "\\":
            at += 1
            if at >= len(pattern):
                return None, at
            char = pattern[at]
        items.append(_literal(char))
        previous = char
        at += 1
    body = "".join(items)
    # A bracket never matches a slash.
    return (f"(?!/)[^{body}]" if negated else f"(?!/)[{body}]" if body else "(?!)"), at + 1


def _literal(char: str) -> str:
    return "\\" + char if char in "\\]^-[&~|" else char
