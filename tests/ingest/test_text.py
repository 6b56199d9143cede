# ruff: noqa: E501 (inputs are written as they stand in files)
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.ingest import encodings
from service.ingest.sniff import wide_without_mark
from service.ingest.text import PIECE_CHARS, pieces
from tests.ingest.conftest import Read, error_of

JAPANESE = "// \u30c7\u30fc\u30bf\u30d9\u30fc\u30b9\u63a5\u7d9a\u3092\u521d\u671f\u5316\u3059\u308b\nint f();\n"
RUSSIAN = "// \u041f\u0440\u0438\u0432\u0435\u0442, \u044d\u0442\u043e \u043f\u0440\u043e\u0432\u0435\u0440\u043a\u0430 \u043a\u043e\u0434\u0438\u0440\u043e\u0432\u043a\u0438 \u0442\u0435\u043a\u0441\u0442\u0430\nint f();\n"
CHINESE = (
    "// \u8fd9\u662f\u4e00\u4e2a\u6570\u636e\u6587\u4ef6\uff0c\u6211\u4eec\u5728\u8fd9\u91cc\u4f7f\u7528\u4e2d\u6587\n"
)
KOREAN = "// \ub370\uc774\ud130\ubca0\uc774\uc2a4 \uc5f0\uacb0\uc744 \ucd08\uae30\ud654\ud569\ub2c8\ub2e4\n"
GERMAN = "# Vertr\xe4ge \u2013 \u201eMuster\u201c kosten 500 \u20ac f\xfcr stra\xdfe\nprint('caf\xe9')\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (JAPANESE, "cp932"),
        (JAPANESE, "euc_jp"),
        (CHINESE, "gb18030"),
        (KOREAN, "cp949"),
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "koi8_r"),
        (GERMAN, "cp1252"),
        (GERMAN, "utf-16-le"),
        (GERMAN, "utf-16-be"),
        (GERMAN, "utf-8"),
        ("x\xe9\n", "cp1252"),
    ],
)
def test_encodings_are_told_by_evidence(text: str, encoding: str) -> None:
    decoded, _, replaced = encodings.decode(text.encode(encoding))
    assert decoded == text
    assert replaced == 0


def test_marks_and_declarations_come_first() -> None:
    for mark, encoding in (
        (b"\xef\xbb\xbf", "utf-8"),
        (b"\xff\xfe", "utf-16-le"),
        (b"\xfe\xff", "utf-16-be"),
        (b"\xff\xfe\0\0", "utf-32-le"),
    ):
        assert encodings.decode(mark + GERMAN.encode(encoding))[0] == GERMAN
    declared = "# -*- coding: iso-8859-15 -*-\n# 5 \u20ac\n"
    assert encodings.decode(declared.encode("iso-8859-15"))[0] == declared
    assert encodings.known("zlib") is None
    assert encodings.known("nonsense") is None


def test_one_broken_byte_in_utf8_is_replaced_and_told(read: Read) -> None:
    data = (GERMAN * 5).encode() + b"\xff broken\n"
    document = read({"a.py": data})
    assert "\ufffd broken" in document.text
    assert "caf\xe9" in document.text
    assert document.row("a.py")["warnings"][0]["code"] == "decode_replaced"
    genuine = read({"a.py": "a real \ufffd stays\n"})
    assert "decode_replaced" not in genuine.codes()


def test_source_is_exact_but_for_what_the_manifest_tells(read: Read) -> None:
    odd = "caf\xe9 cafe\u0301 \u202e bidi \U000e0041 zero\u200bwidth\ufeffmid \u2028 sep \x0c ff \x85 nel \x1b[0m\n"
    files = {
        "odd.py": odd,
        "crlf.cs": "a\r\nb\r\n",
        "mac.txt": "a\rb\r",
        "mixed.txt": "a\r\nb\nc\rd\n",
        "bom.py": "\ufeffx = 1\n",
    }
    document = read(files)
    assert document.body("odd.py") == odd
    assert {"bidi_control", "tag_characters"} <= document.codes()
    assert document.body("crlf.cs") == "a\nb\n"
    assert document.row("crlf.cs")["newlines"] == "crlf"
    assert document.body("mac.txt") == "a\nb\n"
    assert document.body("mixed.txt") == "a\nb\nc\rd\n"
    assert document.body("bom.py") == "x = 1\n"


def test_text_or_binary_goes_by_content(read: Read) -> None:
    late = b"text line\n" * 40_000 + bytes(range(256)) * 40  # binary only behind the first block
    stray = b"one\0stray NUL in a log\n" + b"line of the log\n" * 200
    document = read(
        {
            "late.txt": late,
            "stray.log": stray,
            "real.bin": b"conf = 'TEXT'\n",
            "elf.py": b"\x7fELF\x02\x01" + bytes(200),
        }
    )
    assert document.reasons() == {"late.txt": "binary", "elf.py": "binary"}
    assert "one\ufffdstray" in document.body("stray.log")
    assert "nul_replaced" in document.codes()
    assert "TEXT" in document.text


def test_base64_becomes_a_mark(read: Read) -> None:
    import base64
    import os

    blob = base64.b64encode(os.urandom(300_000)).decode()
    certificate = "\n".join(blob[i : i + 64] for i in range(0, 1600, 64)) + "\n"
    document = read(
        {
            "logo.svg": f'<svg><image href="data:image/png;base64,{blob}"/>end</svg>\n',
            "raw.js": f"x='{blob}'\n",
            "c.pem": certificate,
        }
    )
    assert blob[:200] not in document.text
    assert "end</svg>" in document.text
    assert document.body("c.pem") == certificate
    assert document.manifest["num_tokens"] < 4000


@given(st.text(max_size=200), st.integers(1, 400))
def test_pieces_lose_nothing(text: str, times: int) -> None:
    text = text * times
    cut = list(pieces(text))
    assert "".join(cut) == text
    assert all(0 < len(piece) <= PIECE_CHARS for piece in cut)


def test_hostile_lines_do_not_take_long(read: Read) -> None:
    started = time.monotonic()
    document = read(
        {
            "a.txt": "a" * 2_000_000,
            "b.txt": "A1b2" * 260_000,
            "c.py": "token=" * 200_000,
            "d.py": "-----BEGIN PRIVATE KEY-----" * 20_000,
        },
        kind="bundle",
    )
    assert document.manifest["num_tokens"] > 0
    assert time.monotonic() - started < 30


def test_pages_of_plain_text(read: Read) -> None:
    filing = "<SEC-DOCUMENT>x\n<TEXT>\n<PAGE>\nFIRST\n<PAGE>   2\nSECOND\n<PAGE>\nTHIRD\n</TEXT>\n"
    document = read(filing.encode(), name="filing.txt", kind="doc")
    assert [document.page("filing.txt", n).strip() for n in (1, 2)] == ["FIRST", "SECOND"]
    assert "<SEC-DOCUMENT>" in document.text
    fed = read(b"one\n\x0ctwo\n\x0cthree\n", name="a.txt", kind="doc")
    assert fed.page("a.txt", 3) == "three\n"


def test_transcripts_keep_speakers_and_times(read: Read) -> None:
    vtt = "WEBVTT\n\n1\n00:00:01.000 --> 00:00:04.000 align:start\n<v Ann Lee>Good <i>morning</i>\neverybody\n\n01:02:03.500 --> 01:02:05.000\nBOB: fine\n"
    assert (
        read(vtt.encode(), name="a.vtt", kind="doc").body("a.vtt")
        == "[00:00:01] Ann Lee: Good morning everybody\n[01:02:03] BOB: fine\n"
    )
    srt = "1\r\n00:00:01,000 --> 00:00:02,000\r\nHello\r\n\r\n2\r\n00:00:03,000 --> 00:00:04,000\r\nWorld\r\n"
    assert read(srt.encode(), name="a.srt", kind="doc").body("a.srt") == "[00:00:01] Hello\n[00:00:03] World\n"
    dense = "1\n00:00:01,000 --> 00:00:02,000\nA & B\n2\n00:00:02,000 --> 00:00:03,000\n12\nC\n\nstray words\n"
    body = read(dense.encode(), name="a.srt", kind="doc").body("a.srt")
    assert body == "[00:00:01] A & B\n[00:00:02] 12 C\nstray words\n"
    entities = b"WEBVTT Board meeting\n\n00:01.000 --> 00:02.000\n<v Bob>Yes &amp; &lt;no&gt;\n"
    assert (
        read(entities, name="a.vtt", kind="doc").body("a.vtt") == "WEBVTT Board meeting\n[00:00:01] Bob: Yes & <no>\n"
    )


def test_one_file_that_is_no_text_says_what_it_is(read: Read) -> None:
    assert error_of(lambda: read(bytes(range(256)) * 10, name="a.dat", kind="doc")) == "unsupported_format"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize(
    "words",
    [
        "plain words = 1\n",
        "\u0414\u043e\u0433\u043e\u0432\u043e\u0440 \u0430\u0440\u0435\u043d\u0434\u044b.\n",
        "\u7b2c\u4e00\u6761 \u672c\u5408\u540c\u7531\u53cc\u65b9\u7b7e\u8ba2\u3002\n\u4ed8\u6b3e\u3002\n",
        "\uacc4\uc57d\uc11c \uc81c1\uc870\n",
        "\u03a3\u03c5\u03bc\u03c6\u03c9\u03bd\u03af\u03b1 \u03bc\u03af\u03c3\u03b8\u03c9\u03c3\u03b7\u03c2\n",
    ],
)
def test_wide_encodings_without_a_mark(read: Read, encoding: str, words: str) -> None:
    document = read(words.encode(encoding), name="a.txt", kind="doc")
    assert document.body("a.txt") == words
    assert document.row("a.txt")["encoding"] == encoding


@pytest.mark.parametrize(
    "data", [b"bush hid the facts", b"two\0words of a log\n" + b"line of a log\n" * 200, os.urandom(64) + b"\0\0"]
)
def test_other_bytes_are_not_taken_for_wide_text(data: bytes) -> None:
    assert wide_without_mark(data) is None


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            "Gr\xf6\xdfe, Ma\xdf \u65e5\u672c\n".encode() + b"\xff bad\n",
            "Gr\xf6\xdfe, Ma\xdf \u65e5\u672c\n\ufffd bad\n",
        ),
        ("\xfcber Gr\xf6\xdfe, am Ende \xfc".encode()[:-1], "\xfcber Gr\xf6\xdfe, am Ende \ufffd"),
        (b"a\xed\xa0\xbd\xed\xb8\x80b plain", "a" + "\ufffd" * 6 + "b plain"),
        ("\u5951\u7d04\u66f8 \u7b2c1\u6761\n".encode("iso2022_jp"), "\u5951\u7d04\u66f8 \u7b2c1\u6761\n"),
        (
            "\uff71\uff72\uff73\uff74\uff75 \u30ab\u30bf\u30ab\u30ca\n".encode("cp932"),
            "\uff71\uff72\uff73\uff74\uff75 \u30ab\u30bf\u30ab\u30ca\n",
        ),
        (
            "M\xfcller \xfcber Stra\xdfe \u2013 \u201cso\u201d\n".encode("mac_roman"),
            "M\xfcller \xfcber Stra\xdfe \u2013 \u201cso\u201d\n",
        ),
        ("Gr\xf6\xdfe \u2550\u2550\u2550\u2557\n".encode("cp437"), "Gr\xf6\xdfe \u2550\u2550\u2550\u2557\n"),
    ],
    ids=["one bad byte", "cut off", "halves of pairs", "iso-2022-jp", "half-width kana", "mac", "dos"],
)
def test_damaged_and_rare_encodings(read: Read, data: bytes, text: str) -> None:
    document = read(data, name="a.txt", kind="doc")
    assert document.body("a.txt") == text
    assert ("decode_replaced" in document.codes()) == ("\ufffd" in text)
