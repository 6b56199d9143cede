# ruff: noqa: E501 (inputs are written as they stand in files)
import struct
from email.message import EmailMessage

from service.ingest.parsers.msg import LZFU_PRIMER, decompress_rtf
from tests.ingest.conftest import Read, error_of
from tests.ingest.makers import make_ole, make_pdf, make_zip, text_at


def mail() -> EmailMessage:
    inner = EmailMessage()
    inner["From"], inner["To"], inner["Subject"] = "x@example.org", "y@example.org", "Inner subject"
    inner.set_content("Inner body\n")
    inner.add_attachment(b"Inner attachment\n", maintype="text", subtype="plain", filename="inner.txt")
    outer = EmailMessage()
    outer["From"], outer["To"], outer["Cc"] = "Ren\xe9 M\xfcller <r@example.org>", "a@example.org", "cc@example.org"
    outer["Subject"] = "Vertrag \xa75 \u2013 \xc4nderung, a subject that is long enough to be folded over two lines"
    outer["Date"] = "Mon, 1 Jan 2024 10:00:00 +0000"
    outer.set_content("Plain body caf\xe9 \u20ac5\n", cte="quoted-printable")
    outer.add_alternative("<p>Plain <b>body</b> in HTML</p>", subtype="html")
    pdf = make_pdf([text_at(72, 700, "Words of the annex")])
    outer.add_attachment(pdf, maintype="application", subtype="pdf", filename="Anlage \xfcber Preise.pdf")
    outer.add_attachment(inner)
    outer.add_attachment(
        make_zip({"deep.txt": "Zipped words\n"}), maintype="application", subtype="zip", filename="more.zip"
    )
    return outer


def test_headers_body_once_and_attachments_in_their_order(read: Read) -> None:
    document = read(mail().as_bytes(), name="a.eml", kind="bundle")
    text = document.text
    wanted = ["From: Ren\xe9 M\xfcller <r@example.org>", "Cc: cc@example.org", "Subject: Vertrag \xa75 \u2013 \xc4nderung, a subject that is",
              "Plain body caf\xe9 \u20ac5", "Words of the annex", "Subject: Inner subject", "Inner body", "Inner attachment", "Zipped words"]  # fmt: skip
    assert [w for w in wanted if w not in text] == []
    assert [text.index(w) for w in wanted] == sorted(text.index(w) for w in wanted)
    assert "in HTML" not in text
    assert "Words of the annex" in document.page("a.eml!/Anlage \xfcber Preise.pdf", 1)
    assert document.body("a.eml!/Inner subject.eml!/inner.txt") == "Inner attachment\n"
    assert document.body("a.eml!/more.zip!/deep.txt") == "Zipped words\n"


def test_html_only_bodies_raw_headers_and_wrong_charsets(read: Read) -> None:
    page = EmailMessage()
    page["From"], page["Subject"] = "a@example.org", "s"
    page.set_content("<div>Rich <b>body</b></div><script>NO</script>", subtype="html")
    assert "Rich body" in read(page.as_bytes(), name="a.eml", kind="doc").text
    raw = "From: Jos\xe9 <j@example.org>\r\nTo: b@example.org\r\nSubject: caf\xe9\r\nContent-Type: text/plain; charset=nonsense\r\n\r\nna\xefve\r\n"
    text = read(raw.encode("cp1252"), name="noname", kind="bundle").text
    assert "From: Jos\xe9" in text
    assert "na\xefve" in text
    wide = read(b"\xff\xfe" + raw.replace("nonsense", "utf-8").encode("utf-16-le"), name="a.eml", kind="bundle")
    assert "na\xefve" in wide.text


def test_mailboxes_are_messages_in_order(read: Read) -> None:
    one = "From a@example.org Mon Jan  1 00:00:00 2024\nFrom: a@example.org\nSubject: S{0}\n\nBody {0}\n>From the start\n\n"
    document = read("".join(one.format(i) for i in range(12)).encode(), name="a.mbox", kind="bundle")
    positions = [document.text.index(f"Body {i}\n") for i in range(12)]
    assert positions == sorted(positions)
    assert "\nFrom the start" in document.text


def test_a_mail_that_is_none(read: Read) -> None:
    assert error_of(lambda: read(b"\n\n", name="a.eml", kind="doc")) in ("document_corrupt", "no_text")
    readme = "Note: this is a text.\nIt has: colons.\nAnd: more of them.\n\nBut it is no mail.\n"
    assert read(readme.encode(), name="readme.txt", kind="bundle").body("readme.txt") == readme


def test_outlook_messages(read: Read) -> None:
    def tag(number: str, value: str) -> dict[str, bytes]:
        return {f"__substg1.0_{number}001F": value.encode("utf-16-le")}

    ticks = (1_704_103_200 + 11_644_473_600) * 10_000_000
    properties = bytes(32) + struct.pack("<HHIQ", 0x0040, 0x0039, 6, ticks)
    streams = {
        "__properties_version1.0": properties,
        **tag("0C1A", "Jane Roe"),
        **tag("0E04", "John"),
        **tag("0037", "The subject"),
        **tag("1000", "The body\r\n"),
    }
    text = read(make_ole(streams), name="a.msg", kind="doc").text
    assert "From: Jane Roe\nTo: John\nDate: 2024-01-01 10:00:00 UTC\nSubject: The subject\n\nThe body" in text


def test_packed_rtf() -> None:
    assert len(LZFU_PRIMER) == 207
    literal = b"{\\rtf1 x}"
    runs = b"".join(bytes([0]) + literal[i : i + 8] for i in range(0, len(literal), 8))
    framed = struct.pack("<II4sI", len(runs) + 12, len(literal), b"LZFu", 0) + runs
    assert decompress_rtf(framed) == literal
    reference = struct.pack("<II4sI", 12 + 3, 5, b"LZFu", 0) + bytes([1]) + struct.pack(">H", (0 << 4) | 3)
    assert decompress_rtf(reference) == b"{\\rtf"
    assert decompress_rtf(struct.pack("<II4sI", 20, 4, b"MELA", 0) + b"abcd") == b"abcd"
