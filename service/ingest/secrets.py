"""Suspected secrets: told with their line, and masked on request. Prose that only names a variable is none."""

import math
import re
from collections import Counter
from collections.abc import Iterator

# (kind, lower-case words one of which must be there before the expression is tried, expression)
KNOWN: tuple[tuple[str, tuple[str, ...], re.Pattern[str]], ...] = (
    ("aws_access_key", ("akia", "asia"), re.compile(r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b")),
    (
        "github_token",
        ("ghp_", "gho_", "ghs_", "ghu_", "ghr_", "github_pat_"),
        re.compile(r"\b(?:gh[opsur]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{60,255})\b"),
    ),
    ("gitlab_token", ("glpat-",), re.compile(r"\bglpat-[A-Za-z0-9_-]{20,}\b")),
    ("slack_token", ("xox",), re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10,}")),
    ("stripe_key", ("k_live_",), re.compile(r"\b[sr]k_live_[A-Za-z0-9]{20,}\b")),
    ("api_key", ("sk-",), re.compile(r"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{32,}")),
    ("api_key", ("aiza",), re.compile(r"\bAIza[A-Za-z0-9_-]{35}\b")),
    ("api_key", ("hf_", "npm_"), re.compile(r"\b(?:hf_[A-Za-z0-9]{30,}|npm_[A-Za-z0-9]{36})\b")),
    ("api_key", ("pypi-", "sg."), re.compile(r"\b(?:pypi-[A-Za-z0-9_-]{50,}|SG\.[\w-]{20,}\.[\w-]{40,})")),
    ("jwt", ("eyj",), re.compile(r"\beyJ[A-Za-z0-9_-]{15,}\.eyJ[A-Za-z0-9_-]{15,}\.[A-Za-z0-9_-]{20,}")),
)
# Passwords however plain they are: in an address; in an assignment where a text stands in quotes. Each expression
# begins with its telling word, so that nothing is tried elsewhere.
URL_PASSWORD = re.compile(r"://[^\s:/@\"'<>]{1,64}:(?P<value>[^\s:/@\"'<>]{4,128})@")
PASSWORD = re.compile(
    r"(?:passw(?:or)?d|pwd)[\"']?\s{0,4}(?:=>|:=|[=:])\s{0,4}(?P<quote>[\"'])(?P<value>[^\s\"']{8,128})(?P=quote)"
)
PRIVATE_KEY = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----")
MAX_KEY_CHARS = 16_000
ASSIGNED_HINTS = (
    "secret",
    "passw",
    "token",
    "api_key",
    "apikey",
    "access_key",
    "accesskey",
    "accountkey",
    "private_key",
)
# Begins at the telling word, not at the name's start: nothing is tried at places that can't be one.
ASSIGNED = re.compile(
    r"(?:secret|passw|token|api_?key|access_?key|account_?key|private_?key)[\w.-]{0,40}?[\"']?\s{0,4}(?:=>|:=|[=:])\s{0,4}[\"']?"
    r"(?P<value>[a-z0-9+/_=.~-]{16,200})"
)
PLACEHOLDER = re.compile(
    r"(?i)^(?:x{4,}|\*+|<.*|your|change|todo|none|null|true|false|process\.|os\.|env|self\.|config|settings|\$)"
)


def find_secrets(text: str) -> Iterator[tuple[str, int, int]]:
    """(kind, start, end) of each suspected secret in `text`, not sorted."""
    lower = text.lower()
    yield from _private_keys(text)
    for kind, hints, pattern in KNOWN:
        if any(hint in lower for hint in hints):
            for found in pattern.finditer(text):
                yield kind, found.start(), found.end()
    if len(lower) != len(text):
        return  # a letter whose lower case is longer: offsets would not fit
    plain = [("url_password", URL_PASSWORD)] if "://" in lower and "@" in lower else []
    if "passw" in lower or "pwd" in lower:
        plain.append(("password", PASSWORD))
    for kind, pattern in plain:
        for found in pattern.finditer(lower):
            if _may_be_password(found["value"]):
                yield kind, found.start("value"), found.end("value")
    if not any(hint in lower for hint in ASSIGNED_HINTS):
        return
    for found in ASSIGNED.finditer(lower):
        if _looks_random(text[found.start("value") : found.end("value")]):
            yield "assigned_secret", found.start("value"), found.end("value")


def _private_keys(text: str) -> Iterator[tuple[str, int, int]]:
    behind = 0
    for found in PRIVATE_KEY.finditer(text):
        if found.start() < behind:
            continue
        end = text.find("-----END ", found.end(), found.end() + MAX_KEY_CHARS)
        line_end = text.find("\n", max(end, found.end()))
        behind = len(text) if line_end < 0 else line_end
        yield "private_key", found.start(), behind


def mask(text: str, spans: list[tuple[str, int, int]]) -> str:
    """`text` with each span replaced by a mark; line breaks inside stay, so that line numbers do."""
    out, at = [], 0
    for kind, start, end in sorted(spans, key=lambda span: span[1]):
        if start < at:
            continue
        out += [text[at:start], f"[{kind} masked]", "\n" * text.count("\n", start, end)]
        at = end
    return "".join(out) + text[at:]


def _may_be_password(value: str) -> bool:
    """Letters and digits, and no word for a password that isn't shown."""
    return not PLACEHOLDER.match(value) and any(c.isdigit() for c in value) and any(c.isalpha() for c in value)


def _looks_random(value: str) -> bool:
    """Mixed characters at a high rate of surprise: not a word, a path or a call."""
    if PLACEHOLDER.match(value) or ("." in value and value.replace(".", "").replace("_", "").isalpha()):
        return False
    classes = bool(re.search(r"[a-z]", value)) + bool(re.search(r"[A-Z]", value)) + bool(re.search(r"\d", value))
    counts = Counter(value)
    entropy = -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())
    return classes >= 2 and (classes == 3 or bool(re.search(r"\d", value))) and entropy > 3.2
