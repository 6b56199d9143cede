"""Compound files: locked Office documents are named as such, Word 97 text is read from its piece table (MS-DOC)."""

import struct
from collections.abc import Iterator
from typing import Any

import olefile

from service.ingest.parsers.msg import parse_msg
from service.ingest.parsers.protocol import Message, ParseError, Request, text, warning

ENCRYPTED_STREAMS = ("EncryptedPackage", "EncryptionInfo")
MAX_TEXT_BYTES = 64 * 1024 * 1024
WORD_MAGIC = 0xA5EC
FIELD_BEGIN, FIELD_SEPARATOR, FIELD_END = "\x13", "\x14", "\x15"
MARKS = str.maketrans(
    {
        **dict.fromkeys("\x01\x02\x05\x08\x1f\0"),
        **dict.fromkeys("\r\x0b\x0c", "\n"),
        "\x07": "\t",
        "\x1e": "-",
        "\xa0": " ",
    }
)


def parse(request: Request) -> Iterator[Message]:
    try:
        ole = olefile.OleFileIO(str(request.file))
    except (OSError, ValueError, struct.error, IndexError) as error:
        raise ParseError("unsupported_format", f"an OLE file that can't be opened: {error}") from error
    with ole:
        if any(ole.exists(name) for name in ENCRYPTED_STREAMS):
            raise ParseError("password_required", "the document is encrypted; a password is needed")
        if ole.exists("__properties_version1.0"):
            yield from parse_msg(request)
            return
        if not ole.exists("WordDocument"):
            known = (
                "an old Excel workbook"
                if ole.exists("Workbook") or ole.exists("Book")
                else (
                    "an old PowerPoint presentation"
                    if ole.exists("PowerPoint Document")
                    else "an OLE file of an unknown kind"
                )
            )
            raise ParseError("unsupported_format", f"{known}: save it in a current format (.docx, .xlsx, .pptx, .pdf)")
        yield from _word(ole)


def _word(ole: Any) -> Iterator[Message]:
    data: bytes = ole.openstream("WordDocument").read()
    if len(data) < 0x1AA or struct.unpack_from("<H", data)[0] != WORD_MAGIC:
        raise ParseError("unsupported_format", "a Word document older than Word 97: save it as .docx")
    (flags,) = struct.unpack_from("<H", data, 0x0A)
    if flags & 0x0100:
        raise ParseError("password_required", "the document is encrypted; a password is needed")
    table_name = "1Table" if flags & 0x0200 else "0Table"
    if not ole.exists(table_name):
        raise ParseError("document_corrupt", f"the document has no {table_name} stream")
    table: bytes = ole.openstream(table_name).read()
    try:
        content = _pieces(data, table)
    except (struct.error, IndexError, ValueError) as error:
        raise ParseError("document_corrupt", f"the document's piece table is damaged: {error}") from error
    if flags & 0x0004:
        yield warning("incremental_save")
    yield warning("doc_text_only")
    yield from text(_plain(content))


def _pieces(data: bytes, table: bytes) -> str:
    """Text of the main document, its notes, headers and text boxes, in that order (MS-DOC 2.4.1)."""
    start, size = struct.unpack_from("<II", data, 0x01A2)
    at, end = start, start + size
    while at < end and table[at] == 1:  # formatting records before the piece table
        at += 3 + struct.unpack_from("<H", table, at + 1)[0]
    if at >= end or table[at] != 2:
        raise ValueError("no piece table")
    (length,) = struct.unpack_from("<I", table, at + 1)
    body = table[at + 5 : at + 5 + length]
    count = (length - 4) // 12
    positions = struct.unpack_from(f"<{count + 1}I", body)
    out = []
    total = 0
    for index in range(count):
        characters = positions[index + 1] - positions[index]
        (packed,) = struct.unpack_from("<I", body, 4 * (count + 1) + 8 * index + 2)
        if characters <= 0 or characters > len(data):
            raise ValueError("a piece of impossible length")
        if packed & 0x40000000:
            offset = (packed & 0x3FFFFFFF) // 2
            out.append(data[offset : offset + characters].decode("cp1252", "replace"))
        else:
            offset = packed & 0x3FFFFFFF
            out.append(data[offset : offset + 2 * characters].decode("utf-16-le", "replace"))
        total += characters
        if total > MAX_TEXT_BYTES:
            raise ValueError("text of impossible length")
    return "".join(out)


def _plain(content: str) -> str:
    """Field instructions out, their results in; control characters to what they stand for."""
    out: list[str] = []
    instructions: list[bool] = []
    for char in content:
        if char == FIELD_BEGIN:
            instructions.append(True)
        elif char == FIELD_SEPARATOR:
            if instructions:
                instructions[-1] = False
        elif char == FIELD_END:
            if instructions:
                instructions.pop()
        elif not any(instructions):
            out.append(char)
    return "".join(out).translate(MARKS).replace("\t\t\n", "\n").strip("\n") + "\n"
