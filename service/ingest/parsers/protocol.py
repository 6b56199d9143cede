"""What a parser says of a document, as a sequence of messages (JSON objects, one a line):

{"pages": 120}                                how many pages there are; first, and only where a format has pages
{"page": 3, "label": "A-1", "mark": "page"}   page 3 begins; `mark` is the word to print before its number, or null
{"text": "…"}                                 text of the current page (or of the document), in reading order
{"warning": {"code": …, …}}                   see docs/ingest.md
{"attachment": {"name": …, "file": …}}        a file that was inside, written to the scratch folder
{"ocr": {"page": 3, "image": file}}           the page is an image, to be read by the caller's OCR
{"end": true} | {"error": {"code", "message"}}
"""

import itertools
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lxml import etree

Message = dict[str, Any]
TEXT_CHARS = 16_000
MAX_NAME_CHARS = 200

MAX_RATIO = 200
RATIO_FLOOR_BYTES = 32 * 1024 * 1024


class ParseError(Exception):
    """The document can't be read; `code` as in docs/ingest.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Request:
    file: Path
    name: str
    format: str
    scratch: Path
    options: dict[str, Any]
    max_xml_bytes: int = 64 * 1024 * 1024
    first_page: int = 1
    last_page: int = 1 << 30
    ocr: bool = False


def text(value: str) -> Iterator[Message]:
    for at in range(0, len(value), TEXT_CHARS):
        yield {"text": value[at : at + TEXT_CHARS]}


def attachment(request: "Request", name: str, data: bytes) -> Message:
    """Write a file that was inside `request.file` to the scratch folder."""
    file = request.scratch / f"attachment-{request.file.name}-{next(_attachments)}"
    file.write_bytes(data)
    return {"attachment": {"name": name[:MAX_NAME_CHARS], "file": str(file)}}


_attachments = itertools.count(os.getpid() << 32)  # one name each, in whatever parser process


def warning(code: str, **fields: Any) -> Message:
    return {"warning": {"code": code, **fields}}


def xml_parser(**options: Any) -> etree.XMLParser:
    """Without entities, network, DTDs: nothing of another file gets in, and nothing multiplies."""
    return etree.XMLParser(
        resolve_entities=False,
        no_network=True,
        load_dtd=False,
        dtd_validation=False,
        huge_tree=True,
        recover=True,
        **options,
    )


class OfficeZip:
    """The parts of an office document, each inflated under a ceiling. Made and closed at once it is a mere check."""

    def __init__(self, request: Request) -> None:
        """Raises ParseError document_corrupt, password_required, archive_bomb."""
        self._limit = request.max_xml_bytes
        try:
            self._zip = zipfile.ZipFile(request.file)
        except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError) as error:
            raise ParseError("document_corrupt", f"the document's container can't be read: {error}") from error
        packed = request.file.stat().st_size
        self.names = set(self._zip.namelist())
        # zipfile never yields more than an entry declares, so the sum of what they declare is a bound.
        total = sum(i.file_size for i in self._zip.infolist() if i.filename.endswith((".xml", ".rels")))
        if total > RATIO_FLOOR_BYTES and total > MAX_RATIO * packed:
            raise ParseError("archive_bomb", f"{packed} bytes unpack to {total} bytes of XML: over {MAX_RATIO} to 1")

    def xml(self, name: str) -> Any | None:
        """Root element of a part; None if there is no such part or nothing in it. Raises ParseError."""
        data = self.read(name)
        if data is None:
            return None
        try:
            return etree.fromstring(data, xml_parser())
        except (etree.XMLSyntaxError, ValueError) as error:
            raise ParseError("document_corrupt", f"{name} is no XML: {error}") from error

    def read(self, name: str) -> bytes | None:
        try:
            info = self._zip.getinfo(name)
        except KeyError:
            return None
        if info.flag_bits & 1:
            raise ParseError("password_required", "the document is encrypted; a password is needed")
        if info.file_size > self._limit:
            raise ParseError("archive_bomb", f"{name} unpacks to {info.file_size} bytes, the limit is {self._limit}")
        try:
            return self._zip.read(info)
        except Exception as error:
            raise ParseError("document_corrupt", f"{name} is damaged: {error}") from error

    def close(self) -> None:
        self._zip.close()

    def part(self, name: str) -> Any:
        """Like `xml`, for a part that must be there."""
        root = self.xml(name)
        if root is None:
            raise ParseError("document_corrupt", f"the document has no {name}")
        return root
