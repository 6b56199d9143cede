# ruff: noqa: E501 (inputs are written as they stand in files)
import time
from pathlib import Path

import numpy as np
import pytest

from service.ingest.locate import cite, locate, verify_quote
from tests.ingest.conftest import Document, Read
from tests.ingest.makers import make_pdf, make_zip, text_at

SOURCE = "import os\n\n\ndef start_server(port):\n    return os.getpid() + port\n"


@pytest.fixture
def document(read: Read) -> Document:
    pages = [
        text_at(72, 700, "The tenant shall pay") + text_at(72, 686, "the base rent monthly."),
        text_at(72, 700, "The landlord\222s notice must be")
        + text_at(72, 686, "in writing and sent by courier across"),
        text_at(72, 700, "two pages of this lease."),
    ]
    return read(
        make_zip({"lease.pdf": make_pdf(pages), "app/server.py": SOURCE, "copy/server.py": SOURCE}), kind="bundle"
    )


def test_exact_places_by_file_line_and_token(document: Document) -> None:
    (place,) = locate(document.folder, "start_server(port)")
    assert (place.file, place.page, place.line) == ("app/server.py", None, 4)
    assert "start_server(port)" in document.slice(place.token_start, place.token_end)
    first, second = locate(document.folder, "os")[:2]
    assert (first.line, second.line) == (1, 5)


def test_white_space_quotes_and_pages_are_forgiven(document: Document) -> None:
    (place,) = locate(document.folder, "shall pay   the\nbase rent")
    assert (place.file, place.page, place.line) == ("lease.pdf", 1, 1)
    (curly,) = locate(document.folder, "landlord's notice must be in writing")
    assert (curly.page, curly.line) == (2, 1)
    (over_two_pages,) = locate(document.folder, "courier across two pages")
    assert over_two_pages.page == 2


def test_what_is_not_in_a_file_is_nowhere(document: Document) -> None:
    assert locate(document.folder, "not in there at all") == []
    assert locate(document.folder, "   ") == []
    assert locate(document.folder, "=== lease.pdf ===") == []  # a header of ours
    assert locate(document.folder, "(.*)+$") == []


def test_quotes_are_verified(document: Document) -> None:
    assert verify_quote(document.folder, '"The tenant shall pay \u2026 sent by courier"') is not None
    assert verify_quote(document.folder, "sent by courier ... The tenant shall pay") is None
    assert verify_quote(document.folder, "The tenant shall not pay") is None


def test_a_quote_with_an_ellipsis_is_one_passage(read: Read) -> None:
    filler = "Nothing of this matters here. " * 400
    document = read(
        {
            "a.txt": f"The tenant shall insure the premises.\n{filler}\nThe landlord pays all taxes.\n",
            "b.txt": "He leaves.\n",
        },
        kind="bundle",
    )
    near = verify_quote(document.folder, "tenant shall insure \u2026 Nothing of this matters")
    assert near is not None
    assert document.slice(near.token_start, near.token_end).strip().startswith("tenant shall insure the premises.")
    assert verify_quote(document.folder, "tenant shall insure ... landlord pays all taxes") is None  # too far apart
    assert verify_quote(document.folder, "landlord pays all taxes ... He leaves") is None  # another file
    assert verify_quote(document.folder, "The ... landlord pays all taxes") is None  # a word that stands anywhere


def test_words_broken_by_hyphens_are_found(read: Read) -> None:
    document = read(
        {"a.txt": "It bears the full respon-\n  sibility, a well-\nknown one, co\u00adoperates.\n"}, kind="bundle"
    )
    for quote in (
        "full responsibility",
        "full respon-\nsibility",
        "full respon- sibility",
        "a well-known one",
        "one, cooperates",
    ):
        place = verify_quote(document.folder, quote)
        assert place is not None, quote
    assert [p.line for p in locate(document.folder, "responsibility")] == [1]
    assert verify_quote(document.folder, "full response") is None


def test_a_long_quote_with_broken_words_is_found_whole(read: Read) -> None:
    words = [f"clause{i} of the agree-\nment" for i in range(60)]
    document = read({"a.txt": "Before.\n" + " ".join(words) + "\n"}, kind="bundle")
    quote = " ".join(words).replace("agree-\nment", "agreement")
    place = verify_quote(document.folder, quote)
    assert place is not None
    assert document.slice(place.token_start, place.token_end).split() == " ".join(words).split()
    assert verify_quote(document.folder, quote.replace("clause59", "clause60")) is None


@pytest.mark.parametrize("text", ["a-\n" + " " * 300_000 + "b ", "a" * 300_000, "a-\n" * 100_000, "[page 1" * 50_000])
def test_a_hostile_document_does_not_slow_the_search_down(read: Read, text: str) -> None:
    document = read({"a.txt": text}, kind="bundle")
    started = time.perf_counter()
    assert verify_quote(document.folder, "a" * 60 + "- x y") is None
    assert verify_quote(document.folder, "a x y z") is None
    assert time.perf_counter() - started < 3


def test_answers_are_cited(document: Document) -> None:
    answer = 'The lease says \u201cshall pay the base rent monthly\u201d. See `start_server(port)` and "never said this phrase"; os.getpid() too.'
    citations = cite(document.folder, answer)
    assert [(c.quote, c.place.file) for c in citations] == [
        ("shall pay the base rent monthly", "lease.pdf"),
        ("start_server(port)", "app/server.py"),
        ("os.getpid()", "app/server.py"),
    ]
    assert all(answer[c.start : c.end] == c.quote for c in citations)
    verbatim = cite(document.folder, "The tenant shall pay the base rent monthly.")
    assert [c.place.page for c in verbatim] == [1]


def test_a_million_tokens_answer_at_once(read: Read, tmp_path: Path) -> None:
    rnd = np.random.default_rng(0)
    words = np.array([f"word{i}" for i in range(500)])
    lines = [" ".join(words[rnd.integers(0, 500, 12)]) for _ in range(18_000)]
    lines[15_234] = "the  needle\u2019s place is here"
    document = read({"big.md": "\n".join(lines) + "\n"}, kind="bundle")
    assert document.manifest["num_tokens"] > 1_000_000
    locate(document.folder, "anything")
    started = time.perf_counter()
    (place,) = locate(document.folder, "needle's place is here")
    assert time.perf_counter() - started < 1
    assert place.line == 15_235
