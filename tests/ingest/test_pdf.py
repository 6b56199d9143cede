# ruff: noqa: E501 (inputs are written as they stand in files)
from pathlib import Path

import pytest

from service.ingest import IngestLimits, IngestOptions
from service.ingest.parsers.hyphens import Hyphenation
from tests.ingest.conftest import Document, Read, error_of
from tests.ingest.makers import make_pdf, make_zip, text_at

DATA = Path(__file__).parent / "data"
PROSE = "The tenant shall pay the base rent on the first day"


def lines(*words: str, x: float = 72, top: float = 700, step: float = 14, size: float = 10) -> str:
    return "".join(text_at(x, top - step * i, w, size=size) for i, w in enumerate(words))


def pdf_body(read: Read, data: bytes, **options: object) -> str:
    document = read(data, name="a.pdf", kind="doc", **options)
    return document.body("a.pdf")


def in_order(text: str, *words: str) -> bool:
    at = 0
    for word in words:
        found = text.find(word, at)
        if found < 0:
            return False
        at = found + len(word)
    return True


def test_pages_labels_and_ranges(read: Read) -> None:
    labels = "/PageLabels << /Nums [0 << /S /r >> 2 << /S /D /P (A-) >>] >>"
    pages = [text_at(72, 700, f"Body of page {i}") + text_at(450, 20, f"ACME-{i:07d}", size=8) for i in range(4)]
    document = read(make_pdf(pages, catalog=labels), name="a.pdf", kind="doc")
    assert [p["label"] for p in document.row("a.pdf")["pages"]] == ["i", "ii", "A-1", "A-2"]
    for i in range(4):
        page = document.page("a.pdf", i + 1)
        assert f"Body of page {i}" in page
        assert f"ACME-{i:07d}" in page
        assert f"Body of page {i + 1}" not in page
    assert "[page 3, labelled A-1]" in document.text


def test_many_pages_keep_their_order_over_spans(read: Read) -> None:
    document = read(make_pdf([text_at(72, 700, f"Number {i} here") for i in range(1, 81)]), name="a.pdf", kind="doc")
    assert all(f"Number {i} here" in document.page("a.pdf", i) for i in range(1, 81))
    assert [p["page"] for p in document.row("a.pdf")["pages"]] == list(range(1, 81))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_documents_of_several_spans_side_by_side(read: Read, workers: int) -> None:
    """Each span says more than its queue holds: whoever waits for one must not wait for ever."""
    pages = [lines(*(f"Line {i} of page {n}" for i in range(50)), step=13) for n in range(1, 71)]
    files = {f"{number}.pdf": make_pdf([*pages, text_at(72, 700, f"End {number}")]) for number in range(5)}
    document = read(make_zip(files), kind="bundle", limits=IngestLimits(workers=workers))
    for name in files:
        assert [p["page"] for p in document.row(name)["pages"]] == list(range(1, 72))
        assert "Line 49 of page 70" in document.page(name, 70)


def test_columns_are_read_one_after_the_other_though_drawn_by_rows(read: Read) -> None:
    left = [f"{PROSE} left {i}" for i in range(8)]
    right = [f"Any notice must be in writing and be sent right {i}" for i in range(8)]
    rows = "".join(
        text_at(60, 600 - 14 * i, a, size=9) + text_at(320, 600 - 14 * i, b, size=9)
        for i, (a, b) in enumerate(zip(left, right, strict=True))
    )
    heading = text_at(180, 650, "LEASE AGREEMENT SUMMARY OF ALL THE TERMS", size=12)
    foot = text_at(
        60, 400, "A last line that goes over the whole width of the page and both of its columns, so it does", size=9
    )
    body = pdf_body(read, make_pdf([foot + rows + heading]))
    assert in_order(body, "LEASE AGREEMENT", "left 0", "left 7", "right 0", "right 7", "A last line")


def test_tables_are_read_row_by_row(read: Read) -> None:
    rows = [("Party", "Shares", "Price"), ("Alpha Holdings Ltd", "1,000", "$10.50"), ("Beta LP", "2,500", "$11.25"), ("Gamma", "", "$9.00"),
            ("Delta", "7", "$8.00"), ("Epsilon", "8", "$7.00")]  # fmt: skip
    by_columns = "".join(
        text_at(72 + 150 * c, 700 - 20 * r, row[c]) for c in range(3) for r, row in enumerate(rows) if row[c]
    )
    body = pdf_body(read, make_pdf([by_columns]))
    assert in_order(body, *(cell for row in rows for cell in row if cell))


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_rotated_pages_and_sideways_text(read: Read, rotation: int) -> None:
    matrices = {0: ("1 0 0 1", (72, 700), (0, -16)), 90: ("0 1 -1 0", (100, 72), (16, 0)),
                180: ("-1 0 0 -1", (500, 100), (0, 16)), 270: ("0 -1 1 0", (500, 700), (-16, 0))}  # fmt: skip
    matrix, (x, y), (dx, dy) = matrices[rotation]
    wanted = ["First line of the schedule", "Second line of the schedule", "Third line amount 1,234.50"]
    content = "".join(text_at(x + dx * i, y + dy * i, w, matrix=matrix) for i, w in enumerate(wanted))
    for extra in ({0: f"/Rotate {rotation}"}, {}):  # shown upright, or sideways on an upright page
        assert in_order(pdf_body(read, make_pdf([content], page_extra=extra)), *wanted)


def test_running_lines_stand_once_numbers_stay(read: Read) -> None:
    pages = [
        text_at(200, 760, "Project Falcon Draft")
        + text_at(72, 500, f"Clause {i} of it")
        + text_at(300, 30, f"Page {i} of 5")
        for i in range(1, 6)
    ]
    document = read(make_pdf(pages), name="a.pdf", kind="doc")
    body = document.body("a.pdf")
    assert body.count("Project Falcon Draft") == 1
    assert document.row("a.pdf")["running_lines"] == [{"text": "Project Falcon Draft", "times": 4}]
    assert all(f"Page {i} of 5" in body and f"Clause {i} of it" in body for i in range(1, 6))
    every = read(make_pdf(pages), name="a.pdf", kind="doc", options=IngestOptions(ocr="off", header_once=False))
    assert every.text.count("Project Falcon Draft") == 5


def test_form_values_and_notes(read: Read) -> None:
    field = "<< /Type /Annot /Subtype /Widget /FT /Tx /T (buyer) /V (Jane Roe) /Rect [100 600 300 620] /P 100 0 R >>"
    note = "<< /Type /Annot /Subtype /Text /Contents (Cap too low) /T (Counsel) /Rect [10 10 30 30] >>"
    data = make_pdf(
        [text_at(72, 700, "The form")],
        page_extra={0: "/Annots [10 0 R 11 0 R]"},
        objects=[field, note],
        catalog="/AcroForm << /Fields [10 0 R] >>",
    )
    body = pdf_body(read, data)
    assert "[field buyer: Jane Roe]" in body
    assert "[note by Counsel: Cap too low]" in body


def test_scans_are_told_page_by_page(read: Read) -> None:
    scan = "q 612 0 0 792 0 0 cm /I1 Do Q\n"
    stamp = text_at(100, 780, "Case 1:20-cv-01 Document 7 Filed 01/02/20", size=8)
    mixed = read(
        make_pdf([text_at(72, 700, "Typed page"), scan, stamp + scan, ""], image=True), name="a.pdf", kind="doc"
    )
    assert mixed.codes() == {"page_needs_ocr:2", "page_needs_ocr:3"}
    assert error_of(lambda: read(make_pdf([scan], image=True), name="a.pdf", kind="doc")) == "needs_ocr"
    layered = read(
        make_pdf([scan + text_at(72, 700, "Hidden layer of words", before="3 Tr")], image=True),
        name="a.pdf",
        kind="doc",
    )
    assert "Hidden layer of words" in layered.text
    assert layered.codes() == set()
    assert error_of(lambda: read(make_pdf([""]), name="a.pdf", kind="doc")) == "no_text"


def test_text_that_does_not_show_is_told(read: Read) -> None:
    words = text_at(100, 500, "SECRET NAME OF THE WITNESS")
    box = "0 0 0 rg 95 495 220 20 re f\n"
    shown = text_at(72, 700, "Visible words of the page")

    def codes(content: str) -> set[str]:
        return read(make_pdf([shown + content]), name="a.pdf", kind="doc").codes()

    assert codes(words + box) == {"text_under_box"}
    assert codes(box + words) == {"text_under_box"}  # black on black
    assert codes(box + text_at(100, 500, "White words on black", before="1 1 1 rg")) == set()  # a table's heading
    assert codes(text_at(100, 500, "White words on white", before="1 1 1 rg")) == {"invisible_text"}
    assert codes(text_at(100, 500, "Words without any ink", before="3 Tr")) == {"invisible_text"}
    assert codes(text_at(100, 500, "Words of less than two points", size=1)) == {"invisible_text"}
    assert codes(text_at(2000, 500, "Words far out of the page's paper")) == {"invisible_text"}


def test_words_that_mean_nothing_are_told(read: Read) -> None:
    shifted = " ".join(["bcd fghj klmn pqrst vwxz"] * 12)
    document = read(make_pdf([lines(shifted[:90], shifted[90:180])]), name="a.pdf", kind="doc")
    assert document.codes() == {"page_garbled:1"}


def test_attachments_are_named(read: Read) -> None:
    objects = [
        "<< /Type /Filespec /F (terms.xlsx) /UF (terms.xlsx) /EF << /F 11 0 R >> >>",
        "<< /Type /EmbeddedFile /Length 4 >>\nstream\nabcd\nendstream",
    ]
    data = make_pdf(
        [text_at(72, 700, "Words")],
        objects=objects,
        catalog="/Names << /EmbeddedFiles << /Names [(terms.xlsx) 10 0 R] >> >>",
    )
    assert read(data, name="a.pdf", kind="doc").codes() == {"embedded_file:terms.xlsx"}


def test_broken_files(read: Read) -> None:
    good = make_pdf([text_at(72, 700, "Words of page one"), text_at(72, 700, "Words of page two")])
    shifted = make_pdf([text_at(72, 700, "Words of page one")], xref_shift=55)
    repaired = read(shifted, name="a.pdf", kind="doc")
    assert "Words of page one" in repaired.text
    assert repaired.codes() == {"pdf_repaired"}
    padded = read(b"HTTP/1.1 200 OK\r\n\r\n" + good + b"\n<!-- -->", name="a.pdf", kind="doc")
    assert "Words of page two" in padded.text
    assert error_of(lambda: read(good[:150], name="a.pdf", kind="doc")) == "document_corrupt"
    assert "Words of page one" in read(good, name="really.txt", kind="doc").text
    source = b"import re\n\nMAGIC = b'%PDF-1.4'\nprint(MAGIC, 'obj')\n"
    assert "MAGIC = b'%PDF-1.4'" in read({"sniff.py": source}).text


def test_passwords(read: Read) -> None:
    locked = (DATA / "user_password.pdf").read_bytes()
    assert error_of(lambda: read(locked, name="a.pdf", kind="doc")) == "password_required"
    assert "OWNER-ONLY-MARK" in read(DATA / "owner_password.pdf", name="a.pdf", kind="doc").text
    bundle = read(make_zip({"a/locked.pdf": locked, "b.txt": "neighbour\n"}), kind="bundle")
    assert bundle.reasons() == {"a/locked.pdf": "password_required"}
    assert "password_required" in bundle.codes()


def test_copies_of_a_document_stand_once(read: Read) -> None:
    data = make_pdf([text_at(72, 700, "The only copy")])
    document: Document = read(make_zip({"A/x.pdf": data, "B/x (1).pdf": data, "C/y.PDF": data}), kind="bundle")
    assert document.text.count("The only copy") == 1
    assert document.row("B/x (1).pdf")["pages"] == document.row("A/x.pdf")["pages"]


def test_hyphens() -> None:
    def joined(*given: str) -> str:
        return "|".join(Hyphenation(given).join(list(given)))

    assert joined("and the indem\x02", "nification, as agreed") == "and the indemnification,|as agreed"
    assert joined("a third\ufffe", "party claim") == "a third-party|claim"
    assert joined("a well-", "known fact") == "a well-known|fact"
    assert (
        joined("the long-", "term plan; longterm is written so here")
        == "the longterm|plan; longterm is written so here"
    )
    assert joined("see state-of-the-", "art work") == "see state-of-the-art|work"
    assert joined("Smith\x02", "Jones LLP") == "Smith-|Jones LLP"
    assert joined("pages 3-", "4 of it") == "pages 3-|4 of it"


def test_three_columns_are_read_one_after_the_other(read: Read) -> None:
    words = "the tenant shall keep the premises in good repair"
    rows = [[f"{'abc'[c]}{'abcdefghijklmnop'[r]} {words[: 36 + r % 5]}" for c in range(3)] for r in range(16)]
    drawn = [
        text_at(40 + 182 * c, 700 - 10 * r, line, size=9) for r, row in enumerate(rows) for c, line in enumerate(row)
    ]
    headline = text_at(40, 740, "A headline over the whole width of all three columns", size=18)
    text = read(make_pdf([headline + "".join(drawn)]), name="a.pdf", kind="doc").page("a.pdf", 1)
    starts = [line[:2] for line in text.splitlines() if " the tenant" in line]
    assert starts == [row[c][:2] for c in range(3) for row in rows]
    cells = [
        text_at(40 + 182 * c, 700 - 16 * r, w, size=9)
        for r in range(12)
        for c, w in enumerate(("Item of the list", "came in good time", "was paid by wire"))
    ]
    table = read(make_pdf(["".join(cells)]), name="a.pdf", kind="doc").page("a.pdf", 1)
    assert table.splitlines()[0] == "Item of the list  came in good time  was paid by wire"
