"""OpenDocument text, sheets and slides by their XML: paragraphs, lists, tables, notes, annotations, tracked changes."""

from collections.abc import Iterator
from typing import Any

from service.ingest.parsers.protocol import Message, OfficeZip, ParseError, Request, text, warning

OFFICE = "{urn:oasis:names:tc:opendocument:xmlns:office:1.0}"
TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
DRAW = "{urn:oasis:names:tc:opendocument:xmlns:drawing:1.0}"
DC = "{http://purl.org/dc/elements/1.1/}"
MANIFEST = "{urn:oasis:names:tc:opendocument:xmlns:manifest:1.0}"
MAX_DEPTH = 200
MAX_REPEAT = 64  # of a cell that holds something


def parse(request: Request) -> Iterator[Message]:
    parts = OfficeZip(request)
    manifest = parts.xml("META-INF/manifest.xml")
    if manifest is not None and next(manifest.iter(f"{MANIFEST}encryption-data"), None) is not None:
        raise ParseError("password_required", "the document is encrypted; a password is needed")
    body = parts.part("content.xml").find(f"{OFFICE}body")
    if body is None or not len(body):
        raise ParseError("document_corrupt", "the document has no body")
    writer = _Writer()
    kind = body[0]
    if kind.tag == f"{OFFICE}spreadsheet":
        for index, table in enumerate(kind.iterfind(f"{TABLE}table")):
            yield {"page": index + 1, "label": table.get(f"{TABLE}name"), "mark": "sheet"}
            yield from text("\n".join(writer.blocks([table], 0)) + "\n")
    elif kind.tag == f"{OFFICE}presentation":
        for index, page in enumerate(kind.iterfind(f"{DRAW}page")):
            yield {"page": index + 1, "label": page.get(f"{DRAW}name"), "mark": "slide"}
            yield from text("\n".join(writer.blocks(page, 0)) + "\n")
    else:
        yield from text("\n".join(writer.blocks(kind, 0)).strip("\n") + "\n")
    if writer.tracked:
        yield warning("tracked_changes")


class _Writer:
    def __init__(self) -> None:
        self.tracked = False

    def blocks(self, parent: Any, depth: int) -> Iterator[str]:
        if depth > MAX_DEPTH:
            return
        for element in parent:
            tag = element.tag
            if tag in (f"{TEXT}p", f"{TEXT}h"):
                after: list[str] = []
                yield "".join(self._inline(element, after, depth)).strip("\n")
                yield from after
            elif tag == f"{TEXT}tracked-changes":
                self.tracked = self.tracked or len(element) > 0  # what was deleted stands in here
            elif tag == f"{TABLE}table":
                yield from self._table(element, depth)
            elif tag == f"{TEXT}list-item":
                lines = list(self.blocks(element, depth + 1))
                yield from [f"• {lines[0]}", *lines[1:]] if lines else []
            elif tag in (f"{OFFICE}forms", f"{TEXT}sequence-decls", f"{OFFICE}annotation"):
                continue
            elif isinstance(tag, str):
                yield from self.blocks(element, depth + 1)

    def _inline(self, element: Any, after: list[str], depth: int) -> Iterator[str]:
        if depth > MAX_DEPTH:
            return
        yield element.text or ""
        for child in element:
            tag = child.tag
            if tag == f"{TEXT}s":
                yield " " * min(int(child.get(f"{TEXT}c", "1") or 1), 200)
            elif tag == f"{TEXT}tab":
                yield "\t"
            elif tag == f"{TEXT}line-break":
                yield "\n"
            elif tag == f"{OFFICE}annotation":
                yield self._annotation(child, depth)
            elif tag == f"{TEXT}note":
                yield from self._note(child, after, depth)
            elif tag == f"{DRAW}frame":
                after += [line for line in self.blocks(child, depth + 1) if line.strip()]
            elif isinstance(tag, str) and tag != f"{TEXT}ruby-text":
                yield from self._inline(child, after, depth + 1)
            yield child.tail or ""

    def _annotation(self, element: Any, depth: int) -> str:
        author = element.findtext(f"{DC}creator") or ""
        content = " ".join(self.blocks(element, depth + 1)).strip()
        return f" [comment by {author}: {content}]" if author else f" [comment: {content}]"

    def _note(self, element: Any, after: list[str], depth: int) -> Iterator[str]:
        number = element.findtext(f"{TEXT}note-citation") or "*"
        body = element.find(f"{TEXT}note-body")
        content = " ".join(self.blocks(body, depth + 1)).strip() if body is not None else ""
        yield f"[^{number}]"
        after.append(f"[{element.get(f'{TEXT}note-class', 'note')} {number}: {content}]")

    def _table(self, table: Any, depth: int) -> Iterator[str]:
        for row in table.iter(f"{TABLE}table-row"):
            if next(row.iterancestors(f"{TABLE}table")) is not table:
                continue
            cells = []
            for cell in row:
                if cell.tag not in (f"{TABLE}table-cell", f"{TABLE}covered-table-cell"):
                    continue
                content = " ".join(line for line in self.blocks(cell, depth + 1) if line.strip())
                repeat = int(cell.get(f"{TABLE}number-columns-repeated", "1") or 1)
                cells += [content] * (min(repeat, MAX_REPEAT) if content else min(repeat, 8))
            line = "\t".join(cells).rstrip()
            if line.strip():
                yield line
