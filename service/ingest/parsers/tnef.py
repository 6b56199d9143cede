"""winmail.dat: Outlook's own wrapping of a mail's body and attachments (MS-OXTNEF)."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from service.ingest import encodings
from service.ingest.parsers.html import to_text
from service.ingest.parsers.msg import decompress_rtf
from service.ingest.parsers.rtf import to_text as rtf_to_text

SIGNATURE = 0x223E9F78
BODY, PROPERTIES = 0x0002800C, 0x00069003
NEW_ATTACHMENT, TITLE, DATA, ATTACHMENT_PROPERTIES = 0x00069002, 0x00018010, 0x0006800F, 0x00069005
# MAPI property numbers, and their types of fixed size.
PLAIN, HTML, RTF, LONG_NAME, CONTENT = 0x1000, 0x1013, 0x1009, 0x3707, 0x3701
FIXED_BYTES = {0x02: 4, 0x03: 4, 0x04: 4, 0x05: 8, 0x06: 8, 0x07: 8, 0x0A: 4, 0x0B: 4, 0x14: 8, 0x40: 8, 0x48: 16}
VARIABLE = frozenset({0x1E, 0x1F, 0x0D, 0x102})
UNICODE, OBJECT, MULTIPLE = 0x1F, 0x0D, 0x1000
MAX_PROPERTIES = 5000


@dataclass
class Attached:
    name: str = ""
    data: bytes = b""


@dataclass
class Tnef:
    body: str = ""
    attachments: list[Attached] = field(default_factory=list)


def read_tnef(data: bytes) -> Tnef | None:
    """What a winmail.dat holds, as far as it can be read; None if it is none."""
    if len(data) < 6 or struct.unpack_from("<I", data)[0] != SIGNATURE:
        return None
    out = Tnef()
    for name, value in _attributes(data):
        if name == BODY:
            out.body = out.body or encodings.decode(value.rstrip(b"\0"))[0]
        elif name == PROPERTIES:
            out.body = out.body or _body(dict(_properties(value)))
        elif name == NEW_ATTACHMENT:
            out.attachments.append(Attached())
        elif out.attachments:
            _take(out.attachments[-1], name, value)
    return out


def _take(attached: Attached, name: int, value: bytes) -> None:
    if name == TITLE:
        attached.name = attached.name or encodings.decode(value.rstrip(b"\0"))[0]
    elif name == DATA:
        attached.data = value
    elif name == ATTACHMENT_PROPERTIES:
        properties = dict(_properties(value))
        attached.name = _string(properties.get(LONG_NAME)) or attached.name
        attached.data = attached.data or properties.get(CONTENT, (0, b""))[1]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(level and number, value), each followed by a checksum that writers get wrong."""
    at = 6
    while at + 9 <= len(data):
        number, size = struct.unpack_from("<II", data, at + 1)
        yield number, data[at + 9 : at + 9 + size]
        at += 9 + size + 2


def _properties(data: bytes) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """(number, (type, first value)) of a list of MAPI properties, until it ends or makes no sense."""
    try:
        (count,) = struct.unpack_from("<I", data)
        at = 4
        for _ in range(min(count, MAX_PROPERTIES)):
            kind, number = struct.unpack_from("<HH", data, at)
            at += 4
            if number >= 0x8000:  # a named property: its set, then its number or its name
                by_name, size = struct.unpack_from("<II", data, at + 16)
                at += 24 + (_padded(size) if by_name else 0)
            values = 1
            if kind & MULTIPLE or kind in VARIABLE:
                (values,) = struct.unpack_from("<I", data, at)
                at += 4
            first = b""
            for index in range(min(values, MAX_PROPERTIES)):
                size, skipped = FIXED_BYTES.get(kind & ~MULTIPLE, 0), 0
                if kind & ~MULTIPLE in VARIABLE:
                    (size,) = struct.unpack_from("<I", data, at)
                    at += 4
                    # An object begins with the identifier of its interface.
                    skipped = 16 if kind == OBJECT else 0
                if index == 0:
                    first = data[at + skipped : at + size]
                at += _padded(size)
            yield number, (kind & ~MULTIPLE, first)
    except struct.error:
        return


def _padded(size: int) -> int:
    return -(-size // 4) * 4


def _string(value: tuple[int, bytes] | None) -> str:
    if value is None:
        return ""
    kind, data = value
    if kind == UNICODE:
        return data.decode("utf-16-le", "replace").rstrip("\0")
    return encodings.decode(data.rstrip(b"\0"))[0]


def _body(properties: dict[int, tuple[int, bytes]]) -> str:
    if plain := _string(properties.get(PLAIN)):
        return plain
    if page := properties.get(HTML):
        return to_text(_string(page))[0]
    if packed := properties.get(RTF):
        return rtf_to_text(decompress_rtf(packed[1]))
    return ""
