"""Outlook's MSG: a compound file of MAPI properties (MS-OXMSG), read through olefile."""

import re
import struct
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import olefile

from service.ingest import encodings
from service.ingest.parsers.html import to_text
from service.ingest.parsers.protocol import Message, ParseError, Request, attachment, text, warning

SUBJECT, BODY, HTML, RTF = "0037", "1000", "1013", "1009"
SENDER_NAME, SENDER_ADDRESS, SENT_SMTP = "0C1A", "0C1F", "5D01"
TO, CC, BCC = "0E04", "0E03", "0E02"
ATTACHED_DATA, ATTACHED_LONG_NAME, ATTACHED_NAME, DISPLAY_NAME = "3701", "3707", "3704", "3001"
SUBMIT_TIME, DELIVERY_TIME = 0x0039, 0x0E06
MAX_ATTACHMENTS = 1000
LZFU = b"LZFu"
LZFU_PRIMER = (
    b"{\\rtf1\\ansi\\mac\\deff0\\deftab720{\\fonttbl;}{\\f0\\fnil \\froman \\fswiss \\fmodern \\fscript \\fdecor MS"
    b" Sans SerifSymbolArialTimes New RomanCourier{\\colortbl\\red0\\green0\\blue0\r\n\\par \\pard\\plain\\f0\\fs20"
    b"\\b\\i\\u\\tab\\tx"
)


def parse_msg(request: Request) -> Iterator[Message]:
    try:
        ole = olefile.OleFileIO(str(request.file))
    except (OSError, ValueError, struct.error) as error:
        raise ParseError("document_corrupt", f"the message can't be opened: {error}") from error
    with ole:
        yield from _message(ole, [], request, depth=0)


def _message(ole: Any, at: list[str], request: Request, depth: int) -> Iterator[Message]:
    sender = _string(ole, at, SENDER_NAME)
    address = _string(ole, at, SENT_SMTP) or _string(ole, at, SENDER_ADDRESS)
    if address and address not in sender and "@" in address:
        sender = f"{sender} <{address}>".strip()
    fields = (
        ("From", sender),
        ("To", _string(ole, at, TO)),
        ("Cc", _string(ole, at, CC)),
        ("Bcc", _string(ole, at, BCC)),
        ("Date", _date(ole, at)),
        ("Subject", _string(ole, at, SUBJECT)),
    )
    lines = [f"{name}: {value}" for name, value in fields if value]
    body = _body(ole, at)
    yield from text("\n".join(lines) + "\n\n" + body.replace("\r\n", "\n").strip("\n") + "\n\n")
    storages = sorted({"/".join(path[: len(at) + 1]) for path in ole.listdir() if _is_attachment(path, at)})
    for index, storage in enumerate(storages[:MAX_ATTACHMENTS]):
        inner = storage.split("/")
        name = (
            _string(ole, inner, ATTACHED_LONG_NAME)
            or _string(ole, inner, ATTACHED_NAME)
            or _string(ole, inner, DISPLAY_NAME)
        )
        nested = [*inner, f"__substg1.0_{ATTACHED_DATA}000D"]
        if ole.exists("/".join(nested)):
            if depth >= 8:
                yield warning("mail_parts_left_out")
                continue
            yield from text(f"[attached message {name}]\n")
            yield from _message(ole, nested, request, depth + 1)
            continue
        data = _stream(ole, inner, f"{ATTACHED_DATA}0102")
        if data:
            yield attachment(request, re.split(r"[/\\]", name)[-1] or f"attachment {index + 1}", data)


def _is_attachment(path: list[str], at: list[str]) -> bool:
    return len(path) > len(at) and path[: len(at)] == at and path[len(at)].startswith("__attach_version1.0_#")


def _stream(ole: Any, at: list[str], tag: str) -> bytes:
    path = "/".join([*at, f"__substg1.0_{tag}"])
    if not ole.exists(path) or ole.get_type(path) != olefile.STGTY_STREAM:
        return b""
    data: bytes = ole.openstream(path).read()
    return data


def _string(ole: Any, at: list[str], number: str) -> str:
    wide = _stream(ole, at, f"{number}001F")
    if wide:
        return wide.decode("utf-16-le", "replace").rstrip("\0").strip()
    narrow = _stream(ole, at, f"{number}001E")
    return encodings.decode(narrow.rstrip(b"\0"))[0].strip() if narrow else ""


def _body(ole: Any, at: list[str]) -> str:
    plain = _string(ole, at, BODY)
    if plain:
        return plain
    page = _stream(ole, at, f"{HTML}0102") or _stream(ole, at, f"{HTML}001F")
    if page:
        return to_text(encodings.decode(page)[0])[0]
    packed = _stream(ole, at, f"{RTF}0102")
    if packed:
        from service.ingest.parsers.rtf import to_text as rtf_to_text

        return rtf_to_text(decompress_rtf(packed))
    return ""


def _date(ole: Any, at: list[str]) -> str:
    """Submit or delivery time out of the fixed-length properties: 16-byte records behind a header (MS-OXMSG 2.4)."""
    path = "/".join([*at, "__properties_version1.0"])
    if not ole.exists(path):
        return ""
    data = ole.openstream(path).read()
    found: dict[int, int] = {}
    for start in range(32 if not at else 24, len(data) - 15, 16):
        kind, number = struct.unpack_from("<HH", data, start)
        if kind == 0x0040 and number in (SUBMIT_TIME, DELIVERY_TIME):
            found[number] = struct.unpack_from("<Q", data, start + 8)[0]
    ticks = found.get(SUBMIT_TIME) or found.get(DELIVERY_TIME)
    if not ticks:
        return ""
    try:
        return (datetime(1601, 1, 1, tzinfo=UTC) + timedelta(microseconds=ticks // 10)).strftime(
            "%Y-%m-%d %H:%M:%S UTC"
        )
    except OverflowError:
        return ""


def decompress_rtf(data: bytes) -> bytes:
    """MS-OXRTFCP: LZ77 over a 4,096-byte ring that starts with a primer."""
    if len(data) < 16:
        return b""
    packed_size, raw_size, magic = struct.unpack_from("<II4s", data)
    if magic != LZFU:
        return data[16 : 16 + raw_size]
    ring = bytearray(LZFU_PRIMER.ljust(4096, b"\0"))
    write = len(LZFU_PRIMER)
    out = bytearray()
    at, end = 16, min(len(data), packed_size + 4)
    while at < end and len(out) < raw_size:
        control = data[at]
        at += 1
        for bit in range(8):
            if at >= end:
                break
            if control >> bit & 1:
                if at + 1 >= end:
                    return bytes(out)
                word = data[at] << 8 | data[at + 1]
                at += 2
                offset, length = word >> 4, (word & 15) + 2
                if offset == write:
                    return bytes(out)
                for step in range(length):
                    byte = ring[(offset + step) % 4096]
                    ring[write] = byte
                    write = (write + 1) % 4096
                    out.append(byte)
            else:
                out.append(data[at])
                ring[write] = data[at]
                write = (write + 1) % 4096
                at += 1
    return bytes(out)
