"""Mail: EML and MBOX by the standard library, MSG by its OLE properties. Body once, attachments as files."""

import contextlib
import email
import email.errors
import email.policy
import email.utils
import re
from collections.abc import Iterator
from email.header import decode_header, make_header
from email.message import Message as Mail
from pathlib import Path
from typing import Any

from service.ingest import encodings
from service.ingest.parsers.html import to_text
from service.ingest.parsers.msg import parse_msg
from service.ingest.parsers.protocol import Message, ParseError, Request, attachment, text, warning
from service.ingest.parsers.tnef import Tnef, read_tnef

SHOWN_HEADERS = ("From", "Sender", "To", "Cc", "Bcc", "Reply-To", "Date", "Subject")
MAX_PARTS = 2000
MAX_HEADER_CHARS = 65_536
# `From `, a sender, a time and a year: RFC 4155 and what programs make of it. A sentence beginning with "From" is none.
MBOX_LINE = re.compile(rb"^From \S.{0,200}?\d{1,2}:\d{2}.{0,60}\b\d{4}\b.{0,20}\r?$", re.MULTILINE)
TNEF_TYPES, TNEF_NAME = frozenset({"application/ms-tnef", "application/vnd.ms-tnef"}), "winmail.dat"
MAX_MAIL_BYTES = 256 * 1024 * 1024
OLE_MAGIC = b"\xd0\xcf\x11\xe0"
ENCRYPTED_TYPES = frozenset({"multipart/encrypted", "application/pkcs7-mime", "application/x-pkcs7-mime"})


def parse(request: Request) -> Iterator[Message]:
    if request.file.stat().st_size > MAX_MAIL_BYTES:
        raise ParseError("document_too_large", f"a mail of {request.file.stat().st_size} bytes, limit {MAX_MAIL_BYTES}")
    data = request.file.read_bytes()
    if data.startswith(OLE_MAGIC):
        yield from parse_msg(request)
        return
    data = _as_bytes(data)
    if data.startswith(b"From ") and _is_mbox(data):
        yield from _mbox(data, request)
    else:
        yield from _mail(data, request)


def _as_bytes(data: bytes) -> bytes:
    """A mail saved as UTF-16 is text that was a mail."""
    encoding = encodings.detect(data[:4096])
    if encoding.startswith(("utf-16", "utf-32")):
        return data.decode(encoding, "replace").encode()
    return data.removeprefix(b"\xef\xbb\xbf")


def _is_mbox(data: bytes) -> bool:
    return MBOX_LINE.match(data) is not None


def _mbox(data: bytes, request: Request) -> Iterator[Message]:
    """Each message becomes a file of its own, in order."""
    starts = [
        m.start()
        for m in MBOX_LINE.finditer(data)
        if m.start() == 0 or data[m.start() - 2 : m.start()] in (b"\n\n", b"\r\n")
    ]
    if len(starts) == 1:
        yield from _mail(data[data.find(b"\n") + 1 :], request)
        return
    yield from text(f"Mailbox of {len(starts)} messages\n")
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], len(data)], strict=True)):
        body = data[data.find(b"\n", start) + 1 : end]
        subject = _header(_parsed(body), "Subject") or "message"
        yield attachment(request, f"{index + 1:04d} {subject}.eml", body.replace(b"\n>From ", b"\nFrom "))


def _parsed(data: bytes) -> Mail:
    return email.message_from_bytes(data, policy=email.policy.compat32)


def _mail(data: bytes, request: Request) -> Iterator[Message]:
    mail = _parsed(data)
    lines = [f"{name}: {value}" for name in SHOWN_HEADERS for value in _headers(mail, name)]
    yield from text("\n".join(lines) + "\n\n")
    reader = _Parts(request)
    if mail.get_content_type() in ENCRYPTED_TYPES and "signed" not in str(mail.get_param("smime-type", "")):
        yield warning("entry_encrypted")
    yield from reader.read(mail)
    if not lines and not reader.wrote and not reader.attached:
        raise ParseError("document_corrupt", "there are neither headers nor a body of a mail in it")


class _Parts:
    """Walks one mail's parts."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.attached = 0
        self.wrote = False
        self._seen = 0

    def read(self, part: Mail, depth: int = 0) -> Iterator[Message]:
        self._seen += 1
        if self._seen > MAX_PARTS or depth > 50:
            yield warning("mail_parts_left_out")
            return
        kind = part.get_content_type()
        payload: Any = part.get_payload()
        if kind == "message/rfc822" or (kind == "text/rfc822-headers" and part.is_multipart()):
            for inner in payload if isinstance(payload, list) else ():
                yield self._nested(inner)
        elif kind == "multipart/alternative" and isinstance(payload, list):
            yield from self._alternative(payload, depth)
        elif isinstance(payload, list):
            if kind == "multipart/encrypted":
                yield warning("entry_encrypted")
            for inner in payload:
                yield from self.read(inner, depth + 1)
        else:
            yield from self._leaf(part, kind)

    def _alternative(self, parts: list[Mail], depth: int) -> Iterator[Message]:
        """The same body several times: plain text if it says anything, else the richest form."""
        plain = next((p for p in parts if p.get_content_type() == "text/plain" and _decoded(p)[0].strip()), None)
        chosen = plain or next((p for p in reversed(parts) if p.get_content_type() == "text/html"), None) or parts[-1]
        if plain is not None:
            # A calendar or a picture beside the text is no other form of it.
            rest = [
                p
                for p in parts
                if p is not chosen and p.get_content_type() not in ("text/html", "text/enriched", "text/rtf")
            ]
        else:
            rest = [p for p in parts if p is not chosen and not p.get_content_type().startswith("text/")]
        yield from self.read(chosen, depth + 1)
        for part in rest:
            if part.is_multipart() and plain is not None:
                # multipart/related holding the HTML twin: only what is attached in it
                for inner in part.walk():
                    if not inner.is_multipart() and not inner.get_content_type().startswith("text/"):
                        yield from self._leaf(inner, inner.get_content_type())
            elif part.get_content_type() != "text/plain":
                yield from self.read(part, depth + 1)

    def _leaf(self, part: Mail, kind: str) -> Iterator[Message]:
        name = _filename(part)
        disposition = str(part.get("Content-Disposition", "")).lower()
        if (
            kind in ("text/plain", "text/html", "text/enriched")
            and not disposition.startswith("attachment")
            and not name
        ):
            body, replaced = _decoded(part)
            if kind == "text/html":
                body, hidden = to_text(body)
                if hidden:
                    yield warning("hidden_text")
            if replaced:
                yield warning("decode_replaced", count=replaced)
            if body.strip():
                self.wrote = True
                yield from text(body.replace("\r\n", "\n").rstrip("\n") + "\n\n")
            return
        data = part.get_payload(decode=True)
        if not isinstance(data, bytes) or not data:
            return
        if kind in TNEF_TYPES or name.lower() == TNEF_NAME:
            wrapped = read_tnef(data)
            if wrapped is not None:
                yield from self._unwrapped(wrapped)
                return
        self.attached += 1
        yield attachment(self.request, name or f"attachment {self.attached}{_suffix(kind)}", data)

    def _unwrapped(self, wrapped: Tnef) -> Iterator[Message]:
        """What Outlook wrapped stands where its wrapping stood; the body only where the mail shows none of its own."""
        if wrapped.body.strip() and not self.wrote:
            self.wrote = True
            yield from text(wrapped.body.replace("\r\n", "\n").rstrip("\n") + "\n\n")
        for inner in wrapped.attachments:
            if inner.data:
                self.attached += 1
                yield attachment(self.request, _last_part(inner.name) or f"attachment {self.attached}", inner.data)

    def _nested(self, inner: Mail) -> Message:
        self.attached += 1
        subject = _header(inner, "Subject") or "message"
        return attachment(self.request, f"{subject}.eml", inner.as_bytes(policy=email.policy.compat32))


def _suffix(kind: str) -> str:
    known = {
        "text/plain": ".txt",
        "text/html": ".html",
        "text/calendar": ".ics",
        "application/pdf": ".pdf",
        "text/csv": ".csv",
    }
    return known.get(kind, "")


def _headers(mail: Mail, name: str) -> list[str]:
    # Raw: what is neither ASCII nor encoded would come out replaced otherwise.
    return [_decode_header(str(value)) for key, value in mail.raw_items() if key.lower() == name.lower()]


def _header(mail: Mail, name: str) -> str:
    return next(iter(_headers(mail, name)), "").strip()


def _decode_header(value: str) -> str:
    """RFC 2047 words decoded, folding undone; raw 8-bit bytes by evidence."""
    raw = value.encode("utf-8", "surrogateescape")
    if any(b >= 0x80 for b in raw):
        value, _, _ = encodings.decode(raw)
    # The library takes quadratic time: what follows an absurd length stays as it is.
    value, rest = value[:MAX_HEADER_CHARS], value[MAX_HEADER_CHARS:]
    with contextlib.suppress(ValueError, LookupError, email.errors.MessageError):
        value = str(make_header(decode_header(value)))
    value += rest
    return re.sub(r"\s+", " ", value.encode("utf-8", "replace").decode()).strip()


def _filename(part: Mail) -> str:
    try:
        name = part.get_filename() or ""
    except (ValueError, LookupError, email.errors.MessageError):
        name = ""
    return _last_part(_decode_header(name))


def _last_part(name: str) -> str:
    return Path(name.replace("\\", "/")).name


def _decoded(part: Mail) -> tuple[str, int]:
    """(body, replaced bytes): transfer encoding undone, then the declared charset if it fits, else evidence."""
    data = part.get_payload(decode=True)
    if not isinstance(data, bytes):
        return "", 0
    declared = encodings.known(str(part.get_content_charset() or ""))
    if declared:
        try:
            return data.decode(declared), 0
        except UnicodeError:
            pass
    content, _, replaced = encodings.decode(data)
    return content, replaced
