# ruff: noqa: E501 (inputs are written as they stand in files)
import struct
import time
from email.message import EmailMessage

from service.ingest.parsers.msg import LZFU_PRIMER, decompress_rtf
from service.ingest.parsers.tnef import read_tnef
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


def test_a_line_that_begins_with_from_is_no_new_message(read: Read) -> None:
    box = "From a@b.c Mon Jan  1 10:00:00 2024\nFrom: a@b.c\nSubject: One\n\nbody\n\nFrom here on all is text\n>From quoted\n\n"
    box += "From - Tue Jan 02 10:00:00 2024\nFrom: d@e.f\nSubject: Two\n\nsecond\n"
    document = read(box.encode(), name="a.mbox", kind="doc")
    assert [row["path"] for row in document.manifest["files"]] == [
        "a.mbox",
        "a.mbox!/0001 One.eml",
        "a.mbox!/0002 Two.eml",
    ]
    assert "body\n\nFrom here on all is text\nFrom quoted\n" in document.body("a.mbox!/0001 One.eml")


def test_mails_in_mails_have_a_limit_and_lose_nothing(read: Read) -> None:
    content = b"From: a@b.c\nTo: d@e.f\nSubject: innermost\n\nINNERMOST\n"
    for level in range(30):
        content = f"From: a@b.c\nTo: d@e.f\nSubject: s{level}\nContent-Type: message/rfc822\n\n".encode() + content
    document = read(content, name="a.eml", kind="doc")
    assert len(document.manifest["files"]) == 9
    assert "nested_too_deep" in document.codes()
    assert "INNERMOST" in document.text


def tnef(*attributes: tuple[int, bytes]) -> bytes:
    out = struct.pack("<IH", 0x223E9F78, 1)
    for number, value in attributes:
        out += struct.pack("<BII", 1, number, len(value)) + value + struct.pack("<H", sum(value) & 0xFFFF)
    return out


def test_what_outlook_wraps_is_unwrapped(read: Read) -> None:
    def properties(*rows: tuple[int, int, bytes]) -> bytes:
        out = struct.pack("<I", len(rows))
        for kind, number, value in rows:
            out += struct.pack("<HHII", kind, number, 1, len(value)) + value + bytes(-len(value) % 4)
        return out

    start = (0x00069002, bytes(14))
    wrapped = tnef(
        (0x00069003, properties((0x1F, 0x1000, "Wrapped b\xf6dy".encode("utf-16-le")))),
        start, (0x00018010, b"CONTRA~1.TXT\0"), (0x0006800F, b"FIRST FILE"),
        (0x00069005, properties((0x1F, 0x3707, "..\\Vertr\xe4ge.txt".encode("utf-16-le")))),
        start, (0x00018010, b"second.txt\0"), (0x0006800F, b"SECOND FILE"),
    )  # fmt: skip
    letter = EmailMessage()
    letter["From"], letter["To"], letter["Subject"] = "a@b.c", "d@e.f", "s"
    letter.add_attachment(wrapped, maintype="application", subtype="ms-tnef", filename="winmail.dat")
    document = read(letter.as_bytes(), name="a.eml", kind="doc")
    assert "Wrapped b\xf6dy" in document.body("a.eml")
    assert document.body("a.eml!/Vertr\xe4ge.txt") == "FIRST FILE"
    assert document.body("a.eml!/second.txt") == "SECOND FILE"
    for cut in range(0, len(wrapped), 7):
        read_tnef(wrapped[:cut])
    assert read_tnef(b"no such thing") is None


def test_endless_headers_are_read_at_once(read: Read) -> None:
    words = "=?utf-8?q?Verl=C3=A4ngerung?= " * 3
    header = f"From: a@b.c\nTo: d@e.f\nSubject: {words}{'=?utf-8?q?x?= ' * 40_000}LAST\n\nbody\n"
    started = time.monotonic()
    text = read(header.encode(), name="a.eml", kind="doc").text
    assert time.monotonic() - started < 20
    assert "Verl\xe4ngerungVerl\xe4ngerung" in text
    assert "LAST" in text
