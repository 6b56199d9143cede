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
    raw = PICTURE.sub("", raw)
    try:
        content = str(_rtf_to_text(raw, encoding=codepage, errors="replace"))
    except Exception as error:  # striprtf lets through whatever its arithmetic on damaged numbers raises
        raise ParseError("document_corrupt", f"the RTF can't be read: {error}") from error
    return content.replace("|\n", "\n").replace("\x00", "")
