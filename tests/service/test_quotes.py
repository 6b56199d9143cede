"""Quotes held back until they are verified, whatever the pieces an answer comes in."""

from typing import Any

import pytest

from service.quotes import QuoteCheck

TRUE = ("the rent is due monthly", "notice in writing", "He said no to it", "line one\nline two")


def verify(quote: str) -> dict[str, Any] | None:
    return {"line": 1} if quote in TRUE else None


def checked(answer: str, size: int) -> QuoteCheck:
    check = QuoteCheck(verify)
    shown = "".join(check.take(answer[at : at + size]) for at in range(0, len(answer), size)) + check.close()
    assert shown == check.text
    return check


@pytest.mark.parametrize(
    ("answer", "shown", "verified", "dropped"),
    [
        ('It says "the rent is due monthly."', 'It says "the rent is due monthly."', 1, 0),
        ('It says "rent is never due at all", no.', "It says […], no.", 0, 1),
        ("Er sagt „notice in writing“ und «the rent is due monthly».", None, 2, 0),
        ("Er sagt „notice by mouth“ und « never was in there ».", "Er sagt […] und […].", 0, 2),
        ('The "Company" and the "Base Rent" are 5" apart.', None, 0, 0),
        ('A stray " mark stays.\n\nSo does "this one', None, 0, 0),
        ('Cut off: "the rent is due monthly', None, 1, 0),
        ('Cut off: "the rent is due yearly', "Cut off: […]", 0, 1),
        ("> notice in writing\n> notice by fax only\nEnd.", "> notice in writing\nEnd.", 1, 1),
        ('  > "notice in writing"\n', None, 1, 0),
        (">= 5 and > 3 are comparisons", None, 0, 0),
        ('"line one\nline two" is one', None, 1, 0),
        ('"' + "x" * 3000 + '" is none', None, 0, 0),
        ("“" + "x" * 3000, None, 0, 0),
        ("plain words, spaces at the end  ", None, 0, 0),
        ("", None, 0, 0),
    ],
)
def test_quotes(answer: str, shown: str | None, verified: int, dropped: int) -> None:
    for size in (1, 2, 3, 7, 10_000):
        check = checked(answer, size)
        assert (check.text, len(check.quotes), check.dropped) == (answer if shown is None else shown, verified, dropped)
        for quote in check.quotes:
            assert check.text[quote["start_index"] : quote["end_index"]] == quote["quote"]


def test_text_without_quotes_is_not_held_back() -> None:
    check = QuoteCheck(verify)
    assert check.take("The tenant") == "The tenant"
    assert check.take(" pays ") == " pays"
    assert check.take('"the rent is due') == " "
    assert check.take(' monthly" and') == '"the rent is due monthly" and'
