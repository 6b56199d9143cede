"""PDF by pdfium: pages in reading order, with labels, form values, annotations, and honest warnings."""

import contextlib
import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pypdfium2 as pdfium_document
import pypdfium2.raw as pdfium

from service.ingest.parsers import pdf_hidden
from service.ingest.parsers.hyphens import Hyphenation
from service.ingest.parsers.pdf_chars import read_chars, runs_by_direction
from service.ingest.parsers.pdf_layout import Line, lines_in_order
from service.ingest.parsers.protocol import Message, ParseError, Request, text, warning

EDGE_LINES = 3  # at a page's top and bottom, may be running headers and footers
EDGE_SHARE = 0.085  # of the page's height: a little less than the usual margin
SCAN_IMAGE_SHARE = 0.5
SCAN_MAX_CHARS = 250  # a court's stamp over a scan is no text layer
OCR_DPI = 200
MAX_OCR_PIXELS = 40_000_000
MAX_FIELD_CHARS = 4000
TAIL_BYTES = 2048


@dataclass
class _Page:
    number: int
    label: str | None
    lines: list[str] = field(default_factory=list)
    edges: list[str] = field(default_factory=list)  # "head", "foot" or "", one a line
    extra: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


def parse(request: Request) -> Iterator[Message]:
    document = _open(request.file)
    try:
        total = len(document)
        first = request.first_page == 1
        if first:
            yield {"pages": total}
            yield from _of_the_whole(document, request.file)
        pages = [
            _read_page(document, number, request)
            for number in range(request.first_page, min(request.last_page, total) + 1)
        ]
    finally:
        document.close()
    hyphenation = Hyphenation(line for page in pages for line in page.lines)
    for page in pages:
        yield {"page": page.number, "label": page.label, "mark": "page"}
        yield from page.messages
        body: list[str] = []
        for line, content, edge in zip(page.lines, hyphenation.join(page.lines), page.edges, strict=True):
            if edge and request.options.get("header_once", True):
                yield from text("".join(body))
                body = []
                yield {"text": content + "\n", "edge": edge}
            elif content or not line:
                body.append(content + "\n")
        yield from text("".join(body))
        for extra in page.extra:
            yield from text(extra + "\n")


def _open(file: Path) -> Any:
    try:
        document = pdfium_document.PdfDocument(file)
    except pdfium_document.PdfiumError as error:
        if "password" in str(error).lower():
            raise ParseError("password_required", "the PDF is encrypted; a password is needed to open it") from error
        raise ParseError("document_corrupt", f"the PDF can't be opened: {error}") from error
    with contextlib.suppress(pdfium_document.PdfiumError, ValueError, AttributeError):
        document.init_forms()
    if len(document) == 0:
        document.close()
        raise ParseError("document_corrupt", "the PDF has no pages")
    return document


def _of_the_whole(document: Any, file: Path) -> Iterator[Message]:
    if _is_repaired(file):
        yield warning("pdf_repaired")
    for index in range(min(pdfium.FPDFDoc_GetAttachmentCount(document.raw), 1000)):
        attachment = pdfium.FPDFDoc_GetAttachment(document.raw, index)
        yield warning(f"embedded_file:{utf16(pdfium.FPDFAttachment_GetName, attachment)}")


def _is_repaired(file: Path) -> bool:
    """Whether the cross-reference table isn't where the file says: pdfium has rebuilt it in silence."""
    with open(file, "rb") as data:
        size = data.seek(0, 2)
        data.seek(max(0, size - TAIL_BYTES))
        tail = data.read()
        found = re.findall(rb"startxref\s+(\d+)", tail)
        if not found:
            return True
        data.seek(0)
        head = data.read(1024)
        for shift in {0, max(head.find(b"%PDF-"), 0)}:
            data.seek(int(found[-1]) + shift)
            if re.match(rb"\s*(?:xref\b|\d+\s+\d+\s+obj\b)", data.read(40)):
                return not _first_entry_is_right(data, int(found[-1]) + shift, shift)
    return True


def _first_entry_is_right(data: Any, at: int, shift: int) -> bool:
    """The first used entry of a plain table points at an object."""
    data.seek(at)
    table = data.read(4096)
    section = re.match(rb"\s*xref\s+(\d+)\s+(\d+)\s+", table)
    if section is None:
        return True
    number = int(section.group(1))
    for entry in re.finditer(rb"(\d{10}) \d{5} ([nf])", table[section.end() :]):
        if entry.group(2) == b"n":
            data.seek(int(entry.group(1)) + shift)
            return re.match(rb"\s*%d\s+\d+\s+obj" % number, data.read(32)) is not None
        number += 1
    return True


def _read_page(document: Any, number: int, request: Request) -> _Page:
    page = _Page(number, _label(document, number - 1))
    try:
        loaded = document[number - 1]
    except pdfium_document.PdfiumError:
        page.messages.append(warning(f"page_unreadable:{number}"))
        return page
    try:
        _read_loaded(loaded, page, request)
    finally:
        loaded.close()
    return page


def _read_loaded(loaded: Any, page: _Page, request: Request) -> None:
    number = page.number
    width, height = loaded.get_size()
    handle = pdfium.FPDFText_LoadPage(loaded.raw)
    if not handle:
        page.messages.append(warning(f"page_unreadable:{number}"))
        return
    try:
        chars = read_chars(handle)
        groups = runs_by_direction(handle, chars)
        objects = pdf_hidden.survey_objects(loaded.raw, width, height)
        if pdf_hidden.covered_by_boxes(handle, chars, objects):
            page.messages.append(warning("text_under_box", page=number))
        if _is_invisible(loaded, chars, objects):
            page.messages.append(warning("invisible_text", page=number))
        sample = chars.solid[:: max(1, len(chars.solid) // 48)]
        errors = [pdfium.FPDFText_HasUnicodeMapError(handle, int(i)) == 1 for i in sample]
    finally:
        pdfium.FPDFText_ClosePage(handle)
    _, bottom, _, top = loaded.get_bbox()
    turned = loaded.get_rotation() in (90, 270)
    for group in groups:
        lines = lines_in_order(group)
        upright = not turned and group is groups[0]
        _add_lines(page, lines, top=top if upright else None, bottom=bottom if upright else None)
    page.extra = _annotations(loaded, document_text="\n".join(page.lines))
    garbled = pdf_hidden.looks_garbled(chars.text, errors)
    if garbled:
        page.messages.append(warning(f"page_garbled:{number}"))
    scanned = (
        objects.image_share >= SCAN_IMAGE_SHARE and len(chars.solid) < SCAN_MAX_CHARS and not objects.invisible_text
    )
    drawn = not len(chars.solid) and (objects.image_share > 0.05 or (objects.has_drawings and _is_busy(loaded)))
    if scanned or drawn or garbled:
        _ask_for_ocr(loaded, page, request, replaces=garbled)


def _is_invisible(loaded: Any, chars: Any, objects: pdf_hidden.PageObjects) -> bool:
    """Text that doesn't show on the page, an OCR layer over its scan excepted."""
    if objects.image_share >= 0.3:
        return False
    left, bottom, right, top = loaded.get_cropbox()
    return (
        objects.invisible_text
        or pdf_hidden.has_white_on_white(objects)
        or pdf_hidden.tiny_text(chars)
        or pdf_hidden.outside_page(chars, (left - 20, bottom - 20, right + 20, top + 20))
    )


def _is_busy(loaded: Any) -> bool:
    """Outlined letters are drawings by the hundred; a border or a logo is a few."""
    return int(pdfium.FPDFPage_CountObjects(loaded.raw)) > 50


def _add_lines(page: _Page, lines: list[Line], *, top: float | None, bottom: float | None) -> None:
    """`top` and `bottom` of the paper in the lines' frame; None where that is turned: the text's own extent then."""
    if not lines:
        return
    if page.lines:
        page.lines.append("")
        page.edges.append("")
    top = max(line.y1 for line in lines) if top is None else top
    bottom = min(line.y0 for line in lines) if bottom is None else bottom
    zone = max(EDGE_SHARE * (top - bottom), 1.0)
    for index, line in enumerate(lines):
        content = line.text()
        if not content:
            continue
        edge = ""
        if index < EDGE_LINES and line.middle > top - zone:
            edge = "head"
        elif index >= len(lines) - EDGE_LINES and line.middle < bottom + zone:
            edge = "foot"
        if line.blank_before and page.lines and page.lines[-1] and not edge:
            page.lines.append("")
            page.edges.append("")
        page.lines.append(content)
        page.edges.append(edge)


def _label(document: Any, index: int) -> str | None:
    size = pdfium.FPDF_GetPageLabel(document.raw, index, None, 0)
    if size <= 2:
        return None
    buffer = ctypes.create_string_buffer(size)
    pdfium.FPDF_GetPageLabel(document.raw, index, buffer, size)
    return buffer.raw[: size - 2].decode("utf-16-le", "replace") or None


def _annotations(loaded: Any, *, document_text: str) -> list[str]:
    """Form values and notes that aren't among the page's own characters, one line each."""
    out: list[str] = []
    form = loaded.formenv
    for index in range(min(pdfium.FPDFPage_GetAnnotCount(loaded.raw), 2000)):
        annotation = pdfium.FPDFPage_GetAnnot(loaded.raw, index)
        if not annotation:
            continue
        try:
            kind = pdfium.FPDFAnnot_GetSubtype(annotation)
            if kind == pdfium.FPDF_ANNOT_WIDGET and form is not None:
                out += _field(form.raw, annotation, document_text)
            elif kind not in (pdfium.FPDF_ANNOT_LINK, pdfium.FPDF_ANNOT_POPUP, pdfium.FPDF_ANNOT_WIDGET):
                contents = _annotation_string(annotation, b"Contents").strip()
                if contents and contents not in document_text:
                    author = _annotation_string(annotation, b"T").strip()
                    out.append(f"[note{f' by {author}' if author else ''}: {contents[:MAX_FIELD_CHARS]}]")
        finally:
            pdfium.FPDFPage_CloseAnnot(annotation)
    return [line.replace("\r\n", "\n").replace("\r", "\n") for line in out]


def _field(form: Any, annotation: Any, document_text: str) -> list[str]:
    kind = pdfium.FPDFAnnot_GetFormFieldType(form, annotation)
    name = utf16(pdfium.FPDFAnnot_GetFormFieldAlternateName, form, annotation) or utf16(
        pdfium.FPDFAnnot_GetFormFieldName, form, annotation
    )
    if kind in (pdfium.FPDF_FORMFIELD_CHECKBOX, pdfium.FPDF_FORMFIELD_RADIOBUTTON):
        if not pdfium.FPDFAnnot_IsChecked(form, annotation):
            return [f"[field {name}: not checked]"] if kind == pdfium.FPDF_FORMFIELD_CHECKBOX else []
        return [f"[field {name}: checked]"]
    if kind in (pdfium.FPDF_FORMFIELD_PUSHBUTTON, pdfium.FPDF_FORMFIELD_SIGNATURE):
        return []
    value = utf16(pdfium.FPDFAnnot_GetFormFieldValue, form, annotation).strip()
    return [f"[field {name}: {value[:MAX_FIELD_CHARS]}]"] if value else []


def _annotation_string(annotation: Any, key: bytes) -> str:
    return utf16(pdfium.FPDFAnnot_GetStringValue, annotation, key)


def utf16(call: Any, *arguments: Any) -> str:
    """A string that pdfium hands out as UTF-16 into a buffer of ours, after telling its size in bytes."""
    size = int(call(*arguments, None, 0))
    if size <= 2:
        return ""
    buffer = (ctypes.c_uint16 * (size // 2 + 1))()
    call(*arguments, buffer, size)
    return bytes(buffer)[: size - 2].decode("utf-16-le", "replace")


def _ask_for_ocr(loaded: Any, page: _Page, request: Request, *, replaces: bool) -> None:
    if not request.ocr:
        if not replaces:
            page.messages.append(warning(f"page_needs_ocr:{page.number}"))
        return
    width, height = loaded.get_size()
    scale = OCR_DPI / 72
    if width * height * scale * scale > MAX_OCR_PIXELS:
        scale = (MAX_OCR_PIXELS / max(width * height, 1)) ** 0.5
    bitmap = loaded.render(scale=scale, grayscale=True)
    image = request.scratch / f"ocr-{request.file.name}-{page.number}.png"
    bitmap.to_pil().save(image)
    bitmap.close()
    if replaces:
        page.lines, page.edges = [], []
    page.messages.append({"ocr": {"page": page.number, "image": str(image)}})
