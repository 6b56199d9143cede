"""Files inside documents: attached to PDFs, embedded in office files, and how deep that may go."""

import io
import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from service.ingest import IngestLimits
from tests.ingest.conftest import Read
from tests.ingest.makers import make_docx, make_ole, make_pdf, make_zip, paragraph, text_at

NOTE = "/Subtype /FileAttachment /Rect [10 10 20 20] /FS 12 0 R"


def pdf_with(content: bytes, name: str = "annex.txt", words: str = "Words", *, pinned: bool = False) -> bytes:
    """A PDF with one attached file, in its list of files or pinned to its page."""
    packed = zlib.compress(content).hex()
    filters = f"/Filter [/ASCIIHexDecode /FlateDecode] /Length {len(packed) + 1}"
    stream = f"<< /Type /EmbeddedFile {filters} >>\nstream\n{packed}>\nendstream"
    objects = [
        f"<< /Names [(x) {12} 0 R] >>",
        stream,
        f"<< /Type /Filespec /F ({name}) /UF ({name}) /EF << /F 11 0 R >> >>",
        f"<< /Type /Annot {NOTE} >>",
    ]
    return make_pdf(
        [text_at(72, 700, words)],
        objects=objects,
        catalog="" if pinned else "/Names << /EmbeddedFiles 10 0 R >>",
        page_extra={0: "/Annots [13 0 R]"} if pinned else None,
    )


def native(name: str, content: bytes) -> bytes:
    """An Ole10Native stream as Windows' packager writes it."""
    label = name.encode("cp1252") + b"\0"
    path = b"C:\\Temp\\" + label
    body = b"\x02\0" + label + path + b"\0\0\x03\0" + struct.pack("<I", len(path)) + path
    body += struct.pack("<I", len(content)) + content
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("pinned", [False, True])
def test_files_attached_to_a_pdf_are_read(read: Read, pinned: bool) -> None:
    document = read(pdf_with(b"ANNEX\n", pinned=pinned), name="a.pdf", kind="doc")
    assert [row["path"] for row in document.manifest["files"]] == ["a.pdf", "a.pdf!/annex.txt"]
    assert document.body("a.pdf!/annex.txt") == "ANNEX\n"
    assert document.text.index("Words") < document.text.index("ANNEX")
    assert document.codes() == (set() if pinned else {"embedded_file:annex.txt"})


def test_they_may_be_documents_archives_and_mails(read: Read) -> None:
    letter = b"From: a@b.c\nSubject: s\nContent-Type: multipart/mixed; boundary=z\n\n--z\n\nBODY\n--z\n"
    letter += b"Content-Disposition: attachment; filename=deep.txt\n\nDEEP\n--z--\n"
    inner = pdf_with(make_zip({"mail.eml": letter, "b.docx": make_docx(paragraph("CLAUSE"))}), "all.zip", "Inner words")
    document = read({"x.pdf": pdf_with(inner, "../inner.pdf"), "y.txt": "LAST\n"}, kind="bundle")
    base = "x.pdf!/inner.pdf"
    assert [row["path"] for row in document.manifest["files"]] == [
        "x.pdf",
        base,
        f"{base}!/all.zip",
        f"{base}!/all.zip!/b.docx",
        f"{base}!/all.zip!/mail.eml",
        f"{base}!/all.zip!/mail.eml!/deep.txt",
        "y.txt",
    ]
    assert "CLAUSE" in document.body(f"{base}!/all.zip!/b.docx")
    assert document.body(f"{base}!/all.zip!/mail.eml!/deep.txt") == "DEEP"


def test_objects_and_packages_of_office_files_are_read(read: Read) -> None:
    table = make_docx(paragraph("PACKAGED"))
    parts = {
        "oleObject2.bin": make_ole({"\x01Ole10Native": native("Pr\xe4mie 2.txt", b"SECOND\n")}),
        "oleObject10.bin": make_ole({"\x01Ole10Native": native("C:\\Temp\\ten.txt", b"TENTH\n")}),
        "Microsoft_Word_Document1.docx": table,
        "oleObject3.bin": make_ole({"Package": table + bytes(8)}),
        "oleObject4.bin": make_ole({"CONTENTS": make_pdf([text_at(72, 700, "ACROBAT")])}),
        "oleObject5.bin": make_ole({"\x01Ole10Native": b"\xff\xff\xff\xff damaged"}),
    }
    main = make_docx(paragraph("MAIN"))
    content = _with(main, {f"word/embeddings/{part}": data for part, data in parts.items()})
    document = read(content, name="a.docx", kind="doc")
    rows = {row["path"].partition("!/")[2]: row["status"] for row in document.manifest["files"]}
    packages = ["Microsoft_Word_Document1.docx", "Pr\xe4mie 2.txt"]
    assert list(rows) == ["", *packages, "oleObject3.bin", "oleObject4.pdf", "oleObject5.bin", "ten.txt"]
    assert [path for path, status in rows.items() if status == "skipped"] == ["oleObject5.bin"]
    assert [word for word in ("MAIN", "PACKAGED", "SECOND", "ACROBAT", "TENTH") if word not in document.text] == []
    assert document.row("a.docx!/oleObject3.bin")["kind"] == "docx"


def _with(container: bytes, parts: dict[str, bytes]) -> bytes:
    out = io.BytesIO(container)
    with zipfile.ZipFile(out, "a") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return out.getvalue()


def test_nesting_and_size_have_limits(read: Read) -> None:
    content = pdf_with(b"BOTTOM\n", "bottom.txt", "level 0")
    for level in range(1, 5):
        content = pdf_with(content, f"{level}.pdf", f"level {level}")
    deep = read(content, name="a.pdf", kind="doc", limits=IngestLimits(workers=1, max_nesting=3))
    assert "level 1" in deep.text
    assert "BOTTOM" not in deep.text
    assert "nested_too_deep" in deep.codes()
    assert "BOTTOM" in read(content, name="a.pdf", kind="doc").text
    bomb = pdf_with(bytes(90_000_000), "bomb.bin")
    with pytest.raises(Exception, match="unpack") as caught:
        read(bomb, name="a.pdf", kind="doc")
    assert getattr(caught.value, "code", None) == "archive_bomb"


def test_a_repository_keeps_its_documents_closed(read: Read) -> None:
    document = read({"docs/a.pdf": pdf_with(b"ANNEX\n"), "setup.py": "x = 1\n"}, kind="repo")
    assert [row["path"] for row in document.manifest["files"]] == ["docs/a.pdf", "setup.py"]
    assert document.codes() == {"embedded_file:annex.txt"}


def test_a_locked_document_keeps_its_error(read: Read) -> None:
    locked = (Path(__file__).parent / "data" / "user_password.pdf").read_bytes() + b"% /EmbeddedFile\n"
    document = read({"a.pdf": locked, "b.txt": "B\n"}, kind="bundle")
    assert document.reasons() == {"a.pdf": "password_required"}
