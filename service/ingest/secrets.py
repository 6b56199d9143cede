"""Suspected secrets: told with their line, and masked on request. Prose that only names a variable is none."""

import math
import re
from collections import Counter
from collections.abc import Iterator

# Cheap words first: no expression runs over a piece that holds none of them.
HINTS = (
    "-----begin",
    "akia",
    "asia",
    "ghp_",
    "gho_",
    "ghs_",
    "github_pat",
    "glpat-",
    "xox",
    "sk-",
    "sk_live",
    "rk_live",
    "aiza",
    "eyj",
    "secret",
    "passw",
    "token",
    "api_key",
    "apikey",
    "access_key",
    "accountkey",
    "npm_",
    "hf_",
    "pypi-",
    "sg.",
)

KNOWN: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "private_key",
        re.compile(
            r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----[\s\S]{0,12000}?(?:-----END [A-Z0-9 ]+-----|\Z)"
        ),
    ),
    ("aws_access_key", re.compile(r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b")),
    ("github_token", re.compile(r"\b(?:gh[opsur]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{60,255})\b")),
    ("gitlab_token", re.compile(r"\bglpat-[A-Za-z0-9_-]{20,}\b")),
    ("slack_token", re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10,}")),
    ("stripe_key", re.compile(r"\b[sr]k_live_[A-Za-z0-9]{20,}\b")),
    (
        "api_key",
        re.compile(
            r"\b(?:sk-(?:proj-|ant-)?[A-Za-z0-9_-]{32,}|AIza[A-Za-z0-9_-]{35}|hf_[A-Za-z0-9]{30,}|npm_[A-Za-z0-9]{36}"
            r"|pypi-[A-Za-z0-9_-]{50,}|SG\.[\w-]{20,}\.[\w-]{40,})"
        ),
    ),
    ("jwt", re.compile(r"\beyJ[A-Za-z0-9_-]{15,}\.eyJ[A-Za-z0-9_-]{15,}\.[A-Za-z0-9_-]{20,}")),
)
ASSIGNED = re.compile(
    r"(?i)(?<![A-Za-z0-9])[\w.-]{0,40}?(?:secret|passw(?:or)?d|token|api_?key|access_?key|account_?key|private_?key)[\w.-]{0,40}?"
    r"[\"']?\s{0,4}(?:=>|:=|[=:])\s{0,4}[\"']?(?P<value>[A-Za-z0-9+/_=.~-]{16,200})[\"']?"
)
PLACEHOLDER = re.compile(
    r"(?i)^(?:x{4,}|\*+|<.*|your|change|todo|none|null|true|false|process\.|os\.|env|self\.|config|settings|\$)"
)


def find_secrets(text: str) -> Iterator[tuple[str, int, int]]:
    """(kind, start, end) of each suspected secret in `text`, not sorted."""
    lower = text.lower()
    if not any(hint in lower for hint in HINTS):
        return
    for kind, pattern in KNOWN:
        for found in pattern.finditer(text):
            yield kind, found.start(), found.end()
    for found in ASSIGNED.finditer(text):
        if _looks_random(found["value"]):
            yield "assigned_secret", found.start("value"), found.end("value")


def mask(text: str, spans: list[tuple[str, int, int]]) -> str:
    """`text` with each span replaced by a mark; line breaks inside stay, so that line numbers do."""
    out, at = [], 0
    for kind, start, end in sorted(spans, key=lambda span: span[1]):
        if start < at:
            continue
        out += [text[at:start], f"[{kind} masked]", "\n" * text.count("\n", start, end)]
        at = end
    return "".join(out) + text[at:]


def _looks_random(value: str) -> bool:
    """Mixed characters at a high rate of surprise: not a word, a path or a call."""
    if PLACEHOLDER.match(value) or ("." in value and value.replace(".", "").replace("_", "").isalpha()):
        return False
    classes = bool(re.search(r"[a-z]", value)) + bool(re.search(r"[A-Z]", value)) + bool(re.search(r"\d", value))
    counts = Counter(value)
    entropy = -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())
    return classes >= 2 and (classes == 3 or bool(re.search(r"\d", value))) and entropy > 3.2
