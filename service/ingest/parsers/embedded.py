"""Files inside documents: what is attached to a PDF, objects and packages embedded in DOCX, XLSX and PPTX.

Only the files are told; the document's own text is for its own parser.
"""

import contextlib
import ctypes
import re
import struct
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from service.ingest.encodings import decode
from service.ingest.parsers.protocol import Message, OfficeZip, ParseError, Request, attachment, warning

MAX_FILES = 1000
MAX_FILE_BYTES = 256 * 1024 * 1024
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
NATIVE = "\x01Ole10Native"
# Streams of an OLE object that are a whole file; streams that make the object itself one, and its suffix.
WHOLE_STREAMS = ("Package", "CONTENTS", "EmbeddedOdf")
OWN_STREAMS = {"WordDocument": ".doc", "Workbook": ".xls", "Book": ".xls", "PowerPoint Document": ".ppt"}


def parse(request: Request) -> Iterator[Message]:
    with open(request.file, "rb") as file:
        is_zip = file.read(2) == b"PK"
    yield from _of_office(request) if is_zip else _of_pdf(request)


# --- PDF ---------------------------------------------------------------------------------------------------------


def _of_pdf(request: Request) -> Iterator[Message]:
    import pypdfium2 as pdfium_document
    import pypdfium2.raw as pdfium

    try:
        document = pdfium_document.PdfDocument(request.file)
    except pdfium_document.PdfiumError:
        return  # its own parser says why
    try:
        found = [
            pdfium.FPDFDoc_GetAttachment(document.raw, index)
            for index in range(min(pdfium.FPDFDoc_GetAttachmentCount(document.raw), MAX_FILES))
        ]
        yield from _pdf_files(request, found, 0)
        # Files pinned to a page, as notes are.
        count = len(found)
        for number in range(len(document)):
            with contextlib.suppress(pdfium_document.PdfiumError):
                page = document[number]
                pinned = [pdfium.FPDFPage_GetAnnot(page.raw, i) for i in range(_annotations(page))]
                files = [
                    pdfium.FPDFAnnot_GetFileAttachment(annotation)
                    for annotation in pinned
                    if pdfium.FPDFAnnot_GetSubtype(annotation) == pdfium.FPDF_ANNOT_FILEATTACHMENT
                ]
                yield from _pdf_files(request, files[: MAX_FILES - count], count)
                count += len(files)
                for annotation in pinned:
                    pdfium.FPDFPage_CloseAnnot(annotation)
                page.close()
            if count >= MAX_FILES:
                break
    finally:
        document.close()


def _annotations(page: Any) -> int:
    import pypdfium2.raw as pdfium

    return min(int(pdfium.FPDFPage_GetAnnotCount(page.raw)), 2000)


def _pdf_files(request: Request, files: list[Any], before: int) -> Iterator[Message]:
    import pypdfium2.raw as pdfium

    from service.ingest.parsers.pdf import utf16

    for index, file in enumerate(files, before + 1):
        if not file:
            continue
        name = utf16(pdfium.FPDFAttachment_GetName, file) or f"attachment {index}"
        size = ctypes.c_ulong()
        if not pdfium.FPDFAttachment_GetFile(file, None, 0, size) or not size.value or size.value > MAX_FILE_BYTES:
            yield warning("embedded_unread", name=name)
            continue
        buffer = ctypes.create_string_buffer(size.value)
        pdfium.FPDFAttachment_GetFile(file, buffer, size.value, size)
        yield attachment(request, _last(name), buffer.raw)


# --- office ------------------------------------------------------------------------------------------------------


def _of_office(request: Request) -> Iterator[Message]:
    parts = OfficeZip(request)
    try:
        names = sorted((n for n in parts.names if "/embeddings/" in n), key=_natural)
        for name in names[:MAX_FILES]:
            try:
                data = parts.read(name)
            except ParseError:
                yield warning("embedded_unread", name=_last(name))
                continue
            if data:
                yield (
                    _of_ole(request, _last(name), data)
                    if data.startswith(OLE)
                    else attachment(request, _last(name), data)
                )
    finally:
        parts.close()


def _of_ole(request: Request, name: str, data: bytes) -> Message:
    """The file that an OLE object wraps; the object as it is where it wraps none."""
    import olefile

    try:
        with olefile.OleFileIO(data) as ole:
            if ole.exists(NATIVE) and (packed := _native(ole.openstream(NATIVE).read())):
                return attachment(request, packed[0] or name, packed[1])
            for stream in WHOLE_STREAMS:
                if ole.exists(stream) and (whole := ole.openstream(stream).read()):
                    return attachment(request, _renamed(name, whole), whole)
            for stream, suffix in OWN_STREAMS.items():
                if ole.exists(stream):
                    return attachment(request, PurePosixPath(name).stem + suffix, data)
    except (OSError, ValueError, struct.error, IndexError):
        pass
    return attachment(request, name, data)


def _native(data: bytes) -> tuple[str, bytes] | None:
    """(name, content) of an Ole10Native stream: size, flags, label, path, two words, temporary path, content.

    None if it isn't one.
    """
    try:
        label, _, rest = data[6:].partition(b"\0")
        _, _, rest = rest.partition(b"\0")
        (path_bytes,) = struct.unpack_from("<I", rest, 4)
        (size,) = struct.unpack_from("<I", rest, 8 + path_bytes)
    except struct.error:
        return None
    content = rest[12 + path_bytes : 12 + path_bytes + size]
    if not content or len(content) != size:
        return None
    return _last(decode(label)[0]), content


def _renamed(name: str, content: bytes) -> str:
    suffix = ".pdf" if content.startswith(b"%PDF") else ""
    return PurePosixPath(name).stem + suffix if suffix else name


def _last(name: str) -> str:
    return re.split(r"[/\\]", name)[-1]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() and len(part) < 19 else (-1, part) for part in re.split(r"(\d+)", name)]
