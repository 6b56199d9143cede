"""PPTX by python-pptx: a slide a page, shapes from top to bottom, speaker notes marked."""

from collections.abc import Iterator
from typing import Any

from pptx import Presentation

from service.ingest.parsers.protocol import Message, OfficeZip, ParseError, Request, text, warning

MAX_DEPTH = 20


def parse(request: Request) -> Iterator[Message]:
    OfficeZip(request).close()
    try:
        deck = Presentation(str(request.file))
        slides = list(deck.slides)
    except Exception as error:  # python-pptx lets through whatever its XML lookups raise
        raise ParseError("document_corrupt", f"the presentation can't be opened: {error}") from error
    for number, slide in enumerate(slides, 1):
        yield {"page": number, "label": str(number), "mark": "slide"}
        if slide.element.get("show") == "0":
            yield warning("hidden_slide", page=number)
        lines = list(_shapes(slide.shapes, 0))
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            notes = slide.notes_slide.notes_text_frame.text.strip()
            if notes:
                lines.append(f"[speaker notes: {notes}]")
        yield from text("\n".join(lines).replace("\v", "\n") + "\n")


def _shapes(shapes: Any, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        return
    title = getattr(shapes, "title", None)
    ordered = sorted(shapes, key=lambda s: (s != title, s.top or 0, s.left or 0))
    for shape in ordered:
        if shape.shape_type == 6:  # a group
            yield from _shapes(shape.shapes, depth + 1)
        elif getattr(shape, "has_table", False) and shape.has_table:
            yield from ("\t".join(_cells(row)).rstrip() for row in shape.table.rows)
        elif getattr(shape, "has_chart", False) and shape.has_chart:
            yield from _chart(shape.chart)
        elif shape.has_text_frame:
            content = shape.text_frame.text
            if content.strip():
                yield content.strip("\n")


def _cells(row: Any) -> Iterator[str]:
    for cell in row.cells:
        yield "" if cell.is_spanned else cell.text.replace("\n", " ")


def _chart(chart: Any) -> Iterator[str]:
    if chart.has_title and chart.chart_title.has_text_frame:
        yield chart.chart_title.text_frame.text
    for plot in chart.plots:
        categories = [str(c) for c in plot.categories]
        for series in plot.series:
            pairs = zip(categories, series.values, strict=False)
            yield f"{series.name}: " + ", ".join(f"{c} = {v}" for c, v in pairs)
