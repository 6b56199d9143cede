"""Kinds of plain text that are more than lines: EDGAR filings with pages, transcripts, notebooks.

Everything here turns text into the messages of service.ingest.parsers.protocol, in the ingesting process: no foreign
library touches the bytes.
"""

import html
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, Literal

Flavour = Literal["plain", "html", "paged", "transcript", "notebook"]
Message = dict[str, Any]

HTML_HEAD = re.compile(
    r"\A\ufeff?\s*(?:<\?xml[^>]{0,200}\?>\s*)?(?:<!--.{0,2000}?-->\s*)*<(?:!doctype\s+html|html)[\s>]", re.I | re.S
)
PAGE_TAG = re.compile(r"^[ \t]*<PAGE>[ \t]*(\S{0,20})[ \t]*$", re.MULTILINE)
SUBMISSION_HEAD = re.compile(r"<(?:SEC-DOCUMENT|DOCUMENT|TYPE|TEXT)>|-----BEGIN PRIVACY-ENHANCED")
UUENCODED = re.compile(r"^begin [0-7]{3} [^\n]{1,200}\n(?:[!-`]{1,61}\n){3,}`?\n?end$", re.MULTILINE)
TIMING = re.compile(
    r"^\s*(?:(\d{1,3}):)?(\d{1,2}):(\d{2})[.,](\d{1,3})\s+-->\s+(?:\d{1,3}:)?\d{1,2}:\d{2}[.,]\d{1,3}.*$"
)
VOICE = re.compile(r"<v(?:\.[\w.]+)?\s+([^>]{1,100})>")
CUE_TAGS = re.compile(r"</?(?:v|c|i|b|u|ruby|rt|lang|font)(?:[.\s][^>]{0,200})?>|<\d[\d:.]{3,15}>|\{\\an?\d\}")
MAX_OUTPUT_CHARS = 2000  # of one notebook cell's output


def flavour(name: str, head: str) -> Flavour:
    """What a text of a bundle is, by its name and its first few thousand characters."""
    suffix = PurePosixPath(name.rpartition("/")[2]).suffix.lower()
    if HTML_HEAD.match(head) or (suffix in (".html", ".htm", ".xhtml") and "<" in head):
        return "html"
    if suffix == ".vtt" or head.lstrip("\ufeff").startswith("WEBVTT") or suffix == ".srt":
        return "transcript"
    if suffix == ".ipynb" and head.lstrip().startswith("{"):
        return "notebook"
    return "plain"


def paged(text: str) -> Iterator[Message]:
    """Text whose pages are told by form feeds or EDGAR's <PAGE> lines; without either, one unpaged text.

    The tags of a full-submission file (<SEC-HEADER>, <TYPE>, <S>, <C>) stay: they are no HTML. Pictures encoded as text
    go.
    """
    text = UUENCODED.sub(lambda m: f"[{len(m.group())} characters of an encoded picture left out]", text)
    starts = [(m.start(), m.end()) for m in PAGE_TAG.finditer(text)]
    if not starts and text.strip().count("\f"):
        starts = [(m.start(), m.end()) for m in re.finditer(r"\f", text)]
    if not starts:
        yield {"text": text}
        return
    if PAGE_TAG.match(text, starts[0][0]) and SUBMISSION_HEAD.search(text[: starts[0][0]]):
        # In a full submission the first <PAGE> opens page 1; what precedes it is the envelope.
        yield {"text": text[: starts[0][0]]}
        bounds, ends = starts, [start for start, _ in starts[1:]] + [len(text)]
    else:
        bounds, ends = [(0, 0), *starts], [start for start, _ in starts] + [len(text)]
    number = 0
    for (_, begin), end in zip(bounds, ends, strict=True):
        page = text[begin:end].strip("\n")
        # A first tag at the very top opens page 1.
        if number == 0 and not page.strip() and len(ends) > 1:
            continue
        number += 1
        yield {"page": number, "label": None, "mark": "page"}
        yield {"text": page + "\n"}


def transcript(text: str) -> Iterator[Message]:
    """SRT and WebVTT: one line a cue, `[00:01:02] Speaker: words`; cue numbers, styles and settings go.

    A cue begins with its times, whether or not a blank line stands before it.
    """
    web = text.lstrip("\ufeff \n").startswith("WEBVTT")
    lines: list[str] = []
    for block in re.split(r"\n[ \t]*\n", text.replace("\r", "").strip("\ufeff\n ")):
        rows = block.split("\n")
        starts = [index for index, row in enumerate(rows) if TIMING.match(row)]
        # The line before the times is the cue's number or name; of further cues in a block only a number can be that.
        names = {at - 1 for at in starts if at and (at <= 2 or rows[at - 1].strip().isdecimal())}
        kept = [None if index in names else row for index, row in enumerate(rows)]
        lines += _uncued([row for row in kept[: starts[0] if starts else None] if row is not None])
        for at, end in pairwise([*starts, len(rows)]):
            lines.append(_cue(rows[at], [row for row in kept[at + 1 : end] if row], web))
    yield {"text": "\n".join(lines).strip("\n") + "\n"}


def _uncued(rows: list[str]) -> list[str]:
    """What stands outside of cues: the file's title, notes, stray text. Styles and regions go."""
    if not rows:
        return []
    if rows[0].startswith(("WEBVTT", "STYLE", "REGION")):
        return [row for row in rows[:1] if row.startswith("WEBVTT") and len(row) > 6]
    return [f"({' '.join(rows)[4:].strip()})"] if rows[0].startswith("NOTE") else rows


def _cue(timing: str, rows: list[str], web: bool) -> str:
    found = TIMING.match(timing)
    assert found is not None
    hours, minutes, seconds = int(found[1] or 0), int(found[2]), int(found[3])
    words = " ".join(row.strip() for row in rows if row.strip())
    words = CUE_TAGS.sub("", VOICE.sub(lambda m: f"{m[1].strip()}: ", words)).strip()
    return f"[{hours:02d}:{minutes:02d}:{seconds:02d}] {html.unescape(words) if web else words}".rstrip()


def notebook(text: str) -> Iterator[Message]:
    """Cells in order, code as code, prose as prose (jupytext's percent format); text outputs cut, pictures named.

    What is no notebook comes out as it is.
    """
    try:
        content = json.loads(text)
        # Version 3 had worksheets.
        cells = content["cells"] if "cells" in content else [c for s in content["worksheets"] for c in s["cells"]]
        parts = [_cell(index, cell) for index, cell in enumerate(cells)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield {"text": text}
        return
    yield {"text": "\n".join(parts)}


def _cell(index: int, cell: dict[str, Any]) -> str:
    kind = str(cell.get("cell_type", "raw"))
    label = "" if kind == "code" else f" [{kind}]"
    parts = [f"# %%{label} cell {index + 1}", _joined(cell.get("source", cell.get("input")))]
    for output in cell.get("outputs") or []:
        parts.append(_output(output))
    return "\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data") or {}
    if output.get("output_type") == "error":
        body = f"{output.get('ename')}: {output.get('evalue')}"
    elif "text" in output:
        body = _joined(output["text"])
    elif "text/plain" in data:
        body = _joined(data["text/plain"])
    else:
        body = ""
    pictures = [mime for mime in data if mime.startswith(("image/", "application/"))]
    if len(body) > MAX_OUTPUT_CHARS:
        body = body[:MAX_OUTPUT_CHARS] + f"\n[{len(body) - MAX_OUTPUT_CHARS} further characters left out]"
    note = "".join(f"\n[{mime} left out]" for mime in pictures)
    return "# output:\n" + body.strip("\n") + note if body or note else ""


def _joined(source: Any) -> str:
    return "".join(source) if isinstance(source, list) else str(source or "")
