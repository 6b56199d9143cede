"""Hostile bytes: whatever comes, an ingest ends in a document or in an error of ours."""
# ruff: noqa: E501 (inputs are written as they stand in files)
# ruff: noqa: PT017 (an error is one of the allowed outcomes)

import io
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.ingest import IngestError, IngestLimits, IngestOptions, Source
from service.ingest.collect import Collector, Opened
from service.ingest.parsers import docx, html, mail, odf, ole, pdf, rtf
from service.ingest.parsers.protocol import Message, ParseError, Request
from service.ingest.spool import Spool
from tests.ingest.makers import (
    make_doc,
    make_docx,
    make_odt,
    make_pdf,
    make_tar,
    make_zip,
    paragraph,
    tar_link,
    text_at,
)

SEEDS = [
    make_zip({"a/b.txt": "text " * 50, "c.py": "x = 1\n", "d.zip": make_zip({"e.txt": "inner"})}),
    make_tar({"a/b.txt": "text " * 50, "c.py": "x = 1\n"}, extra=[tar_link("l", "a/b.txt")]),
    make_tar({"a.txt": "text " * 50}, "w:gz"),
]
edits = st.lists(
    st.tuples(st.integers(0, 10**6), st.binary(min_size=0, max_size=6), st.integers(0, 6)), min_size=1, max_size=8
)


def mutate(data: bytes, changes: list[tuple[int, bytes, int]]) -> bytes:
    out = bytearray(data)
    for at, insert, drop in changes:
        at %= len(out) + 1
        out[at : at + drop] = insert
    return bytes(out)


def no_mail(file: Path, name: str, format: str) -> Opened:
    return Opened("mail\n")


@given(st.sampled_from(SEEDS), edits, st.sampled_from(["repo", "bundle", "auto"]))
@settings(max_examples=200, deadline=None)
def test_damaged_archives(seed: bytes, changes: list[tuple[int, bytes, int]], kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        upload = Path(folder) / "upload"
        upload.write_bytes(mutate(seed, changes))
        spool = Spool(Path(folder) / "spool")
        limits = IngestLimits(max_unpacked_bytes=1 << 22, max_entries=50)
        collector = Collector(spool, limits, IngestOptions(), no_mail, lambda fraction, note: None)
        try:
            found = collector.collect([Source(upload, "upload")], kind)  # type: ignore[arg-type]
            for entry in found.entries:
                assert entry.path.isprintable() or "\u00ad" in entry.path or " " in entry.path
                if entry.reason is None and entry.format != "binary":
                    assert sum(map(len, spool.blocks(entry))) == entry.size
        except IngestError as error:
            assert error.message
        finally:
            spool.close()
        assert {p.name for p in Path(folder).iterdir()} == {"upload", "spool"}


@given(
    st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30), st.binary(max_size=40)),
        max_size=8,
    )
)
@settings(max_examples=120, deadline=None)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_any_names_in_a_zip(files: list[tuple[str, bytes]]) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files:
            archive.writestr(zipfile.ZipInfo(name), data)
    with tempfile.TemporaryDirectory() as folder:
        upload = Path(folder) / "upload"
        upload.write_bytes(out.getvalue())
        spool = Spool(Path(folder) / "spool")
        collector = Collector(spool, IngestLimits(), IngestOptions(), no_mail, lambda fraction, note: None)
        try:
            found = collector.collect([Source(upload, "upload.zip")], "repo")
            assert not any(".." in e.path.split("/") or e.path.startswith("/") or "\n" in e.path for e in found.entries)
            assert len({e.path for e in found.entries}) == len(found.entries)
        except IngestError as error:
            assert error.code in ("archive_unsafe_path", "empty_input", "archive_corrupt")
        finally:
            spool.close()


DOCUMENTS: list[tuple[str, Callable[[Request], object], bytes]] = [
    ("pdf", pdf.parse, make_pdf([text_at(72, 700, "Words of the page")], page_extra={0: "/Annots []"})),
    ("docx", docx.parse, make_docx(paragraph("words") * 5, numbering="<w:numbering NS/>")),
    ("odf", odf.parse, make_odt("<text:p>words</text:p>")),
    ("rtf", rtf.parse, rb"{\rtf1\ansi{\fonttbl{\f0 A;}}words \'e9\u8212?\par}"),
    ("ole", ole.parse, make_doc("words of the document\r")),
    (
        "mail",
        mail.parse,
        b"From: a@b.c\nSubject: =?utf-8?q?x?=\nContent-Type: multipart/mixed; boundary=z\n\n--z\n\nbody\n--z\nContent-Disposition: attachment; filename=a\n\nx\n--z--\n",
    ),
    ("html", html.parse, b"<html><body><table><tr><td>a<td>b</table><ol start=3><li>x</ol><pre>y</pre>"),
]


@pytest.mark.parametrize(("name", "parse", "seed"), DOCUMENTS, ids=[d[0] for d in DOCUMENTS])
def test_damaged_documents(name: str, parse: Callable[[Request], "list[Message]"], seed: bytes, tmp_path: Path) -> None:
    file = tmp_path / "document"

    @given(edits)
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(changes: list[tuple[int, bytes, int]]) -> None:
        file.write_bytes(mutate(seed, changes))
        try:
            for message in parse(Request(file, "document", name, tmp_path, {})):
                assert isinstance(message, dict)
        except ParseError as error:
            assert error.code

    check()
