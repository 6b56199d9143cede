"""RTF by striprtf."""

import re
from collections.abc import Iterator
from typing import Any

from striprtf.striprtf import rtf_to_text

from service.ingest.parsers.protocol import Message, ParseError, Request, text, warning

_rtf_to_text: Any = rtf_to_text  # it has no type annotations
MAX_BYTES = 64 * 1024 * 1024
PICTURE = re.compile(
    r"\{\\(?:\*\\shppict|pict|nonshppict|\*\\objdata|\*\\themedata|\*\\colorschememapping|\*\\datastore)\b[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
)
# The reader knows these as destinations that aren't shown.
NOTE = re.compile(r"\{\\(?:footnote|\*\\annotation)(?![a-z])")
BRACE = re.compile(r"\\[{}\\]|[{}]")
MAX_NOTE_CHARS = 100_000
HIDDEN = re.compile(r"\\v(?![a-z0-9])")


def parse(request: Request) -> Iterator[Message]:
    if request.file.stat().st_size > MAX_BYTES:
        raise ParseError("document_too_large", f"an RTF file of {request.file.stat().st_size} bytes, limit {MAX_BYTES}")
    data = request.file.read_bytes()
    content = to_text(data)
    if HIDDEN.search(data.decode("latin-1")):
        yield warning("hidden_text")
    if rb"\revised" in data or rb"\deleted" in data:
        yield warning("tracked_changes")
    yield from text(content)


def _notes_in_place(raw: str) -> str:
    """Footnotes and comments as text at their anchors, marked as such."""
    out, behind = [], 0
    for found in NOTE.finditer(raw):
        end = _group_end(raw, found.end()) if found.start() >= behind else None
        if end is not None:
            kind = "footnote" if raw.startswith("{\\footnote", found.start()) else "comment"
            out += [raw[behind : found.start()], f"{{ [{kind}: ", raw[found.end() : end], "]}"]
            behind = end + 1
    return "".join(out) + raw[behind:]


def _group_end(raw: str, start: int) -> int | None:
    """Where the group closes that is open at `start`; None if that is too far."""
    depth = 1
    for found in BRACE.finditer(raw, start, start + MAX_NOTE_CHARS):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return found.start()
    return None


def to_text(data: bytes) -> str:
    """Raises ParseError if it is no RTF."""
    raw = data.decode("latin-1")
    raw = raw[max(raw.find("{\\rtf"), 0) :]
    found = re.search(r"\\ansicpg(\d{3,5})", raw[:4096])
    codepage = f"cp{found.group(1)}" if found and found.group(1) not in ("0", "65001", "10000") else "cp1252"
    try:
        "".encode(codepage)
    except LookupError:
        codepage = "cp1252"
    # Pictures are megabytes of hexadecimal digits that the reader would only step over.
    raw = _notes_in_place(PICTURE.sub("", raw))
    try:
        content = str(_rtf_to_text(raw, encoding=codepage, errors="replace"))
    except Exception as error:  # striprtf lets through whatever its arithmetic on damaged numbers raises
        raise ParseError("document_corrupt", f"the RTF can't be read: {error}") from error
    content = re.sub(r"\[(footnote|comment): {2,4}", r"[\1: ", content)
    return content.replace("|\n", "\n").replace("\x00", "")
