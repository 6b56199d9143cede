"""XLSX by openpyxl, streamed: rows that hold something, dates as ISO, formulas where no value is stored."""

import zipfile
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from itertools import zip_longest
from typing import IO, Any

import openpyxl
from openpyxl.utils.exceptions import InvalidFileException

from service.ingest.parsers.protocol import Message, OfficeZip, ParseError, Request, text, warning

MAX_ROWS = 1_048_576


def parse(request: Request) -> Iterator[Message]:
    OfficeZip(request).close()
    # Opened here: openpyxl judges a path by its suffix.
    with open(request.file, "rb") as first, open(request.file, "rb") as second:
        yield from _workbook(first, second)


def _workbook(first: IO[bytes], second: IO[bytes]) -> Iterator[Message]:
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
        cells.append(("\t" * (gap - (column == 0)) if gap <= 8 else f"\t[{source.coordinate}] ") + _shown(value))
        column = at
    return "".join(cells) if column else ""


def _shown(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds") if value.time() != time() else value.date().isoformat()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return str(value)
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float):
        return repr(round(value, 12)) if value != int(value) or abs(value) > 1e15 else str(int(value))
    shown = getattr(value, "text", value)  # array formulas
    return str(shown).replace("\r\n", " ").replace("\n", " ").replace("_x000D_", "")
