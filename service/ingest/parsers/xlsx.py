"""XLSX by openpyxl, streamed: rows that hold something, dates as ISO, formulas where no value is stored."""

import math
import posixpath
import zipfile
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from itertools import zip_longest
from typing import IO, Any

import openpyxl
from openpyxl.utils.exceptions import InvalidFileException

from service.ingest.parsers.protocol import Message, OfficeZip, ParseError, Request, text, warning

S = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


def parse(request: Request) -> Iterator[Message]:
    parts = OfficeZip(request)
    # Opened here: openpyxl judges a path by its suffix.
    with open(request.file, "rb") as first, open(request.file, "rb") as second:
        yield from _workbook(first, second, parts)
    parts.close()


def _workbook(first: IO[bytes], second: IO[bytes], parts: OfficeZip) -> Iterator[Message]:
    try:
        values = openpyxl.load_workbook(first, read_only=True, data_only=True, keep_links=False)
        formulas = openpyxl.load_workbook(second, read_only=True, data_only=False, keep_links=False)
    except (
        InvalidFileException,
        zipfile.BadZipFile,
        KeyError,
        ValueError,
        OSError,
        TypeError,
        AttributeError,
    ) as error:
        raise ParseError("document_corrupt", f"the workbook can't be opened: {error}") from error
    for index, name in enumerate(values.sheetnames):
        sheet, with_formulas = values[name], formulas[name]
        yield {"page": index + 1, "label": name, "mark": "sheet"}
        if getattr(sheet, "sheet_state", "visible") != "visible":
            yield warning("hidden_sheet", sheet=name)
        if hasattr(sheet, "iter_rows"):
            yield from _rows(sheet, with_formulas)
            yield from _comments(parts, str(getattr(sheet, "_worksheet_path", "")))


def _rows(sheet: Any, with_formulas: Any) -> Iterator[Message]:
    # What the file says of its extent may be wrong both ways; and one far cell must not make a grid.
    sheet.reset_dimensions()
    with_formulas.reset_dimensions()
    held: list[str] = []
    size = 0
    for row, raw in zip_longest(sheet.iter_rows(), with_formulas.iter_rows(), fillvalue=()):
        line = _row(row, raw)
        if line:
            held.append(line + "\n")
            size += len(line)
        if size > 16_000:
            yield from text("".join(held))
            held, size = [], 0
    yield from text("".join(held))


def _row(row: Any, raw: Any) -> str:
    cells = []
    column = 0
    for cell, source in zip_longest(row, raw):
        value = None if cell is None else cell.value
        if value is None and source is not None and source.value is not None:
            value = source.value  # a formula that was never calculated
        if value is None:
            continue
        at = getattr(cell if cell is not None and cell.value is not None else source, "column", column + 1)
        # Empty cells between are tabs, so that columns stay columns; a far cell says where it is instead.
        gap = at - column
        before = "\t" * (gap - (column == 0)) if gap <= 8 else f"\t[{source.coordinate}] "
        cells.append(before + _shown(value, str(getattr(cell, "number_format", "") or "")))
        column = at
    return "".join(cells) if column else ""


def _comments(parts: OfficeZip, sheet: str) -> Iterator[Message]:
    """Notes on a sheet's cells, one a line behind its rows: openpyxl leaves them out when it streams."""
    folder, _, name = sheet.lstrip("/").rpartition("/")
    relations = parts.xml(f"{folder}/_rels/{name}.rels") if name else None
    for relation in relations if relations is not None else ():
        if not str(relation.get("Type", "")).endswith("/comments"):
            continue
        target = posixpath.normpath(posixpath.join("/", folder, str(relation.get("Target", ""))))
        root = parts.xml(target.lstrip("/"))
        authors = [] if root is None else [author.text or "" for author in root.iter(f"{S}author")]
        for comment in root.iter(f"{S}comment") if root is not None else ():
            number = str(comment.get("authorId", ""))
            author = authors[int(number)] if number.isdecimal() and int(number) < len(authors) else ""
            content = " ".join("".join(t.text or "" for t in comment.iter(f"{S}t")).split())
            if content:
                by = f" by {author}" if author else ""
                yield {"text": f"[comment on {comment.get('ref', '?')}{by}: {content}]\n"}


def _shown(value: Any, number_format: str = "") -> str:
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds") if value.time() != time() else value.date().isoformat()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return str(value)
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if number_format.endswith("%") and isinstance(value, int | float):
        return f"{round(value * 100, 10):.15g}%"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, float):
        return repr(round(value, 12)) if value != int(value) or abs(value) > 1e15 else str(int(value))
    shown = getattr(value, "text", value)  # array formulas
    return str(shown).replace("\r\n", " ").replace("\n", " ").replace("_x000D_", "")
