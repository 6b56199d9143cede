# ruff: noqa: E501 (inputs are written as they stand in files)
import io
from datetime import date
from pathlib import Path

import openpyxl
import pytest
from openpyxl.comments import Comment
from pptx import Presentation

from service.ingest import IngestOptions
from service.ingest.parsers.docx_numbering import format_number
from tests.ingest.conftest import Read, error_of
from tests.ingest.makers import make_doc, make_docx, make_odt, make_ole, make_zip, paragraph

DATA = Path(__file__).parent / "data"


def docx_body(read: Read, body: str, options: IngestOptions | None = None, **parts: str) -> str:
    return read(make_docx(body, **parts), name="a.docx", kind="doc", options=options).body("a.docx")


def test_tracked_changes_show_the_final_view(read: Read) -> None:
    change = 'w:id="1" w:author="A"'
    body = (
        f'<w:p><w:r><w:t xml:space="preserve">The fee is </w:t></w:r><w:del {change}><w:r><w:delText>100</w:delText></w:r></w:del>'
        f'<w:ins {change}><w:r><w:t>250</w:t></w:r></w:ins><w:r><w:t xml:space="preserve"> euros.</w:t></w:r></w:p>'
        f"<w:p><w:pPr><w:rPr><w:del {change}/></w:rPr></w:pPr><w:del {change}><w:r><w:delText>GONE</w:delText></w:r></w:del></w:p>"
        f"<w:p><w:moveFrom {change}><w:r><w:t>MOVED</w:t></w:r></w:moveFrom></w:p>"
        f"<w:p><w:moveTo {change}><w:r><w:t>MOVED</w:t></w:r></w:moveTo></w:p>"
        f"<w:tbl><w:tr><w:trPr><w:del {change}/></w:trPr><w:tc>{paragraph('DELETED ROW')}</w:tc></w:tr><w:tr><w:tc>{paragraph('ROW')}</w:tc></w:tr></w:tbl>"
    )
    document = read(make_docx(body), name="a.docx", kind="doc")
    text = document.body("a.docx")
    assert "The fee is 250 euros." in text
    assert text.count("MOVED") == 1
    assert "GONE" not in text
    assert "DELETED ROW" not in text
    assert "tracked_changes" in document.codes()
    marked = docx_body(read, body, IngestOptions(ocr="off", mark_deletions=True))
    assert "The fee is [deleted: 100]250 euros." in marked


def test_comments_notes_fields_and_hidden_text(read: Read) -> None:
    body = (
        '<w:p><w:r><w:t>The cap</w:t></w:r><w:r><w:commentReference w:id="7"/></w:r><w:r><w:footnoteReference w:id="2"/></w:r></w:p>'
        '<w:p><w:r><w:fldChar w:fldCharType="begin"/></w:r><w:r><w:instrText>REF _x</w:instrText></w:r><w:r><w:fldChar w:fldCharType="separate"/></w:r>'
        '<w:r><w:t>Clause 4.2</w:t></w:r><w:r><w:fldChar w:fldCharType="end"/></w:r><w:r><w:t xml:space="preserve"> applies</w:t></w:r></w:p>'
        "<w:p><w:r><w:rPr><w:vanish/></w:rPr><w:t>UNSEEN</w:t></w:r><w:r><w:noBreakHyphen/><w:tab/><w:t>x</w:t></w:r></w:p>"
        '<w:p><w:r><mc:AlternateContent><mc:Choice Requires="wps"><w:drawing><w:txbxContent>'
        + paragraph("BOXED")
        + "</w:txbxContent></w:drawing>"
        "</mc:Choice><mc:Fallback><w:pict><w:txbxContent>"
        + paragraph("BOXED")
        + "</w:txbxContent></w:pict></mc:Fallback></mc:AlternateContent></w:r></w:p>"
    )
    document = read(
        make_docx(
            body,
            comments=f'<w:comments NS><w:comment w:id="7" w:author="Counsel A">{paragraph("cap too low")}</w:comment></w:comments>',
            footnotes=f'<w:footnotes NS><w:footnote w:id="2">{paragraph("See annex.")}</w:footnote></w:footnotes>',
            header1=f"<w:hdr NS>{paragraph('Project Falcon')}</w:hdr>",
            header2=f"<w:hdr NS>{paragraph('Project Falcon')}</w:hdr>",
            footer1=f"<w:ftr NS>{paragraph('Confidential')}</w:ftr>",
        ),
        name="a.docx",
        kind="doc",
    )
    text = document.body("a.docx")
    assert "The cap [comment by Counsel A: cap too low][^2]" in text
    assert "[footnote 2: See annex.]" in text
    assert "Clause 4.2 applies" in text
    assert "REF _x" not in text
    assert "[hidden: UNSEEN]-\tx" in text
    assert text.count("BOXED") == 1
    assert text.count("[header: Project Falcon]") == 1
    assert "[footer: Confidential]" in text
    assert document.codes() == {"hidden_text"}


NUMBERING = (
    '<w:numbering NS><w:abstractNum w:abstractNumId="0">'
    '<w:lvl w:ilvl="0"><w:start w:val="1"/><w:numFmt w:val="decimal"/><w:pStyle w:val="H1"/><w:lvlText w:val="%1."/></w:lvl>'
    '<w:lvl w:ilvl="1"><w:start w:val="1"/><w:numFmt w:val="decimal"/><w:lvlText w:val="%1.%2"/></w:lvl>'
    '<w:lvl w:ilvl="2"><w:start w:val="1"/><w:numFmt w:val="lowerLetter"/><w:lvlText w:val="(%3)"/></w:lvl>'
    '</w:abstractNum><w:abstractNum w:abstractNumId="1"><w:lvl w:ilvl="0"><w:numFmt w:val="bullet"/><w:lvlText w:val="-"/></w:lvl></w:abstractNum>'
    '<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
    '<w:num w:numId="2"><w:abstractNumId w:val="0"/><w:lvlOverride w:ilvl="0"><w:startOverride w:val="9"/></w:lvlOverride></w:num>'
    '<w:num w:numId="3"><w:abstractNumId w:val="1"/></w:num></w:numbering>'
)
STYLES = (
    '<w:styles NS><w:style w:styleId="H1"><w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr></w:style>'
    '<w:style w:styleId="Child"><w:basedOn w:val="H1"/></w:style></w:styles>'
)


def numbered(words: str, level: int, number: int = 1) -> str:
    return paragraph(words, f'<w:pPr><w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{number}"/></w:numPr></w:pPr>')


def test_automatic_numbers_are_printed(read: Read) -> None:
    body = (
        paragraph("DEFINITIONS", '<w:pPr><w:pStyle w:val="H1"/></w:pPr>')
        + numbered("Person means", 1)
        + numbered("a man", 2)
        + numbered("a company", 2)
        + numbered("Term means", 1)
        + paragraph("TERM", '<w:pPr><w:pStyle w:val="Child"/></w:pPr>')
        + numbered("Subject to", 1)
        + numbered("a point", 0, 3)
        + paragraph("unnumbered", '<w:pPr><w:pStyle w:val="H1"/><w:numPr><w:numId w:val="0"/></w:numPr></w:pPr>')
        + numbered("restarted", 0, 2)
    )
    text = docx_body(read, body, numbering=NUMBERING, styles=STYLES)
    assert text.split("\n")[:10] == [
        "1. DEFINITIONS", "1.1 Person means", "(a) a man", "(b) a company", "1.2 Term means", "2. TERM", "2.1 Subject to",
        "\u2022 a point", "unnumbered", "9. restarted",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "form", "printed"),
    [(28, "lowerLetter", "bb"), (4, "upperRoman", "IV"), (1994, "lowerRoman", "mcmxciv"), (21, "ordinal", "21st"), (12, "ordinal", "12th"),
     (7, "decimalZero", "07"), (21, "cardinalText", "Twenty-one"), (3, "ordinalText", "Third"), (40, "ordinalText", "Fortieth"), (5, "odd", "5")],
)  # fmt: skip
def test_number_formats(value: int, form: str, printed: str) -> None:
    assert format_number(value, form) == printed


def test_tables_keep_their_order_and_merged_cells_once(read: Read) -> None:
    nested = f"<w:tbl><w:tr><w:tc>{paragraph('NESTED')}</w:tc></w:tr></w:tbl>"
    merge = '<w:tcPr><w:vMerge w:val="{}"/></w:tcPr>'
    body = (
        paragraph("BEFORE")
        + f'<w:tbl><w:tr><w:tc><w:tcPr><w:gridSpan w:val="2"/></w:tcPr>{paragraph("SPAN")}</w:tc><w:tc>{paragraph("C | pipe")}</w:tc></w:tr>'
        + f"<w:tr><w:tc>{merge.format('restart')}{paragraph('TALL')}</w:tc><w:tc>{paragraph('B2')}</w:tc></w:tr>"
        + f"<w:tr><w:tc>{merge.format('continue')}{paragraph('TALL')}</w:tc><w:tc>{nested}{paragraph('')}</w:tc></w:tr></w:tbl>"
        + paragraph("AFTER")
    )
    text = docx_body(read, body)
    assert text.split("\n")[:6] == ["BEFORE", "SPAN\tC | pipe", "TALL\tB2", "\tNESTED", "", "AFTER"]


def test_office_files_that_are_none_or_locked_or_bombs(read: Read) -> None:
    assert error_of(lambda: read(make_zip({"x": "y"}), name="a.docx", kind="doc")) == "document_corrupt"
    assert error_of(lambda: read(DATA / "password.docx", name="a.docx", kind="doc")) == "password_required"
    bomb = make_docx(paragraph("A" * (60 << 20)))
    assert error_of(lambda: read(bomb, name="a.docx", kind="doc")) == "archive_bomb"
    entity = make_docx(paragraph("&x;")).replace(b"", b"")
    assert b"PK" in entity
    hostile = make_zip(
        {
            "[Content_Types].xml": "<Types/>",
            "word/document.xml": '<!DOCTYPE d [<!ENTITY x SYSTEM "file:///etc/passwd"><!ENTITY a "AAAAAAAAAA"><!ENTITY b "&a;&a;&a;&a;">]>'
            '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>'
            "<w:p><w:r><w:t>SAFE &x;&b;</w:t></w:r></w:p></w:body></w:document>",
        }
    )
    document = read(hostile, name="a.docx", kind="doc")
    assert "SAFE" in document.text
    assert "root:" not in document.text
    assert "AAAA" not in document.text


def test_workbooks(read: Read) -> None:
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Cap Table"
    sheet.append(["Holder", "Shares", "Since"])
    sheet.append(["Alpha", 1234.5, date(2023, 5, 1)])
    sheet["C3"] = "=B2*2"
    sheet["ZZ9000"] = "FAR"
    sheet.merge_cells("A5:C5")
    sheet["A5"] = "MERGED"
    hidden = book.create_sheet("Hidden")
    hidden.sheet_state = "hidden"
    hidden["A1"] = "UNSEEN"
    out = io.BytesIO()
    book.save(out)
    document = read(out.getvalue(), name="a.xlsx", kind="doc")
    text = document.body("a.xlsx")
    assert "Holder\tShares\tSince\nAlpha\t1234.5\t2023-05-01\n" in text
    assert "=B2*2" in text
    assert text.count("MERGED") == 1
    assert "[ZZ9000] FAR" in text
    assert "UNSEEN" in document.page("a.xlsx", 2)
    assert document.codes() == {"hidden_sheet"}
    assert document.manifest["num_tokens"] < 400


def test_slides(read: Read) -> None:
    deck = Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[1])
    slide.shapes.title.text = "TITLE"
    slide.placeholders[1].text = "BULLET"
    slide.notes_slide.notes_text_frame.text = "SAID"
    table = slide.shapes.add_table(1, 2, 0, 5_000_000, 1000, 1000).table
    table.cell(0, 0).text, table.cell(0, 1).text = "L", "R"
    out = io.BytesIO()
    deck.save(out)
    document = read(out.getvalue(), name="a.pptx", kind="doc")
    assert document.page("a.pptx", 1).split("\n")[:4] == ["TITLE", "BULLET", "L\tR", "[speaker notes: SAID]"]


def test_open_documents(read: Read) -> None:
    body = (
        "<text:tracked-changes><text:changed-region>x<text:p>DELETED</text:p></text:changed-region></text:tracked-changes>"
        '<text:h>Heading</text:h><text:p>stra\xdfe<text:s text:c="2"/>two<text:tab/>tab<text:note text:note-class="footnote">'
        "<text:note-citation>1</text:note-citation><text:note-body><text:p>NOTE</text:p></text:note-body></text:note></text:p>"
        "<text:list><text:list-item><text:p>point</text:p></text:list-item></text:list>"
        "<table:table><table:table-row><table:table-cell><text:p>a</text:p></table:table-cell><table:table-cell/><table:table-cell><text:p>c</text:p>"
        "</table:table-cell></table:table-row></table:table>"
    )
    document = read(make_odt(body), name="a.odt", kind="doc")
    assert document.body("a.odt") == "Heading\nstra\xdfe  two\ttab[^1]\n[footnote 1: NOTE]\n\u2022 point\na\t\tc\n"
    assert document.codes() == {"tracked_changes"}


def test_old_word_rtf_and_unknown_compound_files(read: Read) -> None:
    old = "First paragraph\r\x13 HYPERLINK x\x14shown\x15 caf\xe9\rcell\x07\x07"
    document = read(make_doc(old), name="a.doc", kind="doc")
    assert document.body("a.doc").startswith("First paragraph\nshown caf\xe9\ncell")
    assert error_of(lambda: read(make_ole({"Workbook": b"x" * 100}), name="a.xls", kind="doc")) == "unsupported_format"
    assert (
        error_of(lambda: read(make_ole({"EncryptedPackage": b"x"}), name="a.docx", kind="doc")) == "password_required"
    )
    assert (
        error_of(lambda: read(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(300), name="a.doc", kind="doc"))
        == "unsupported_format"
    )
    rtf = r"{\rtf1\ansi\ansicpg1252{\fonttbl{\f0 Arial;}}\f0 Caf\'e9 \u8212? {\*\generator X;}end\par second}"
    assert read(rtf.encode(), name="a.rtf", kind="doc").body("a.rtf").split() == ["Caf\xe9", "\u2014", "end", "second"]


def test_web_pages_in_a_bundle_and_in_a_repository(read: Read) -> None:
    page = (
        "<!DOCTYPE html><html><head><meta charset=windows-1252><title>TITLE</title><style>STYLE</style><script>SCRIPT</script></head>"
        "<body><!-- COMMENT --><p>caf\xe9 un<b>brok</b>en &lt;tag&gt;</p><ol><li>one<li>two</ol><table><tr><td>C1<td>C2</table>"
        "<pre>a\n  b</pre><p style='display:none'>UNSEEN</p>END"
    ).encode("cp1252")
    document = read(page, name="a.html", kind="bundle")
    text = document.body("a.html")
    assert text.startswith("TITLE\n\ncaf\xe9 unbroken <tag>\n")
    assert "1. one\n2. two" in text
    assert "C1\tC2" in text
    assert "a\n  b" in text
    assert not any(word in text for word in ("STYLE", "SCRIPT", "COMMENT"))
    assert "hidden_text" in document.codes()
    assert "<script>SCRIPT" in read({"a.html": page}, kind="repo").text
    assert "END" in read(page, name="really.pdf", kind="doc").text
    deep = "<div>" * 20_000 + "DEEP"
    assert "DEEP" in read(("<html>" + deep).encode(), name="a.html", kind="doc").text


def test_books(read: Read) -> None:
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><manifest><item id="b" href="two.xhtml"/><item id="a" href="one%20x.xhtml"/></manifest>'
        '<spine><itemref idref="a"/><itemref idref="b"/></spine></package>'
    )
    container = '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile full-path="OPS/p.opf"/></rootfiles></container>'
    data = make_zip(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": container,
            "OPS/p.opf": package,
            "OPS/one x.xhtml": "<html><body><p>ONE</p></body></html>",
            "OPS/two.xhtml": "<html><body><p>TWO</p></body></html>",
        }
    )
    document = read(data, name="a.epub", kind="doc")
    assert document.page("a.epub", 1) == "ONE\n"
    assert document.page("a.epub", 2) == "TWO\n"


def test_notes_on_cells_and_percentages(read: Read) -> None:
    book = openpyxl.Workbook()
    sheet = book.active
    assert sheet is not None
    sheet["A1"], sheet["B1"], sheet["C1"] = "share", 0.125, 2
    sheet["B1"].number_format = "0.0%"
    sheet["B1"].comment = Comment("of the\nwhole", "Ann")
    out = io.BytesIO()
    book.save(out)
    assert read(out.getvalue(), name="a.xlsx", kind="doc").page("a.xlsx", 1) == (
        "share\t12.5%\t2\n[comment on B1 by Ann: of the whole]\n"
    )


def test_notes_and_comments_of_rtf_stand_at_their_anchors(read: Read) -> None:
    rtf = r"{\rtf1\ansi The rent{\super\chftn{\footnote\pard{\super\chftn} Net of \{tax\}.}} is due{\*\annotation Really?}.\par}"
    assert read(rtf.encode(), name="a.rtf", kind="doc").body("a.rtf").split("\n")[0] == (
        "The rent [footnote: Net of {tax}.] is due [comment: Really?]."
    )
