"""EPUB: its chapters in reading order, each an HTML page."""

import posixpath
from collections.abc import Iterator
from urllib.parse import unquote

from service.ingest.encodings import decode
from service.ingest.parsers.html import to_text
from service.ingest.parsers.protocol import Message, OfficeZip, ParseError, Request, text, warning

CONTAINER = "{urn:oasis:names:tc:opendocument:xmlns:container}"
OPF = "{http://www.idpf.org/2007/opf}"


def parse(request: Request) -> Iterator[Message]:
    parts = OfficeZip(request)
    root_file = parts.part("META-INF/container.xml").find(f".//{CONTAINER}rootfile")
    if root_file is None:
        raise ParseError("document_corrupt", "the EPUB names no package")
    package_name = root_file.get("full-path", "")
    package = parts.part(package_name)
    items = {item.get("id"): item.get("href", "") for item in package.iter(f"{OPF}item")}
    if "META-INF/encryption.xml" in parts.names and "META-INF/rights.xml" in parts.names:
        raise ParseError("password_required", "the EPUB is protected")
    number = 0
    for reference in package.iter(f"{OPF}itemref"):
        name = posixpath.normpath(
            posixpath.join(posixpath.dirname(package_name), unquote(items.get(reference.get("idref"), "")))
        )
        data = parts.read(name)
        if data is None:
            yield warning("chapter_missing", chapter=name)
            continue
        number += 1
        yield {"page": number, "label": None, "mark": "chapter"}
        yield from text(to_text(decode(data)[0])[0])
