"""Streaming text: whole characters, stop strings across tokens, nothing lost."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text_stream import TextStream


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def test_a_character_comes_out_whole() -> None:
    stream = TextStream(decode_bytes)
    assert [stream.push(byte) for byte in "a€😀".encode()] == ["a", "", "", "€", "", "", "", "😀"]
    assert stream.finish() == ""


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    stream = TextStream(decode_bytes)
    assert "".join(stream.push(byte) for byte in "é".encode()[:1]) == ""
    assert stream.finish() == "�"


def test_a_stop_string_across_tokens_is_never_shown() -> None:
    stream = TextStream(decode_bytes, stop=("END", "\n\n"))
    shown = [stream.push(byte) for byte in b"an EEND"]
    assert "".join(shown) == "an E"
    assert stream.stopped
    assert stream.finish() == ""


def test_what_only_looked_like_a_stop_string_is_shown() -> None:
    stream = TextStream(decode_bytes, stop=("END",))
    assert "".join(stream.push(byte) for byte in b"ENx EN") == "ENx "
    assert stream.finish() == "EN"


def test_the_earliest_stop_string_wins() -> None:
    stream = TextStream(lambda ids: "".join("one two three "[i * 2 : i * 2 + 2] for i in ids), stop=("three", "two"))
    assert "".join(stream.push(i) for i in range(7) if not stream.stopped) == "one "


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=2))
def test_the_pieces_add_up(text: str, stop: list[str]) -> None:
    stream, shown = TextStream(decode_bytes, stop), ""
    for byte in text.encode():
        shown += stream.push(byte)
        if stream.stopped:
            break
    shown += stream.finish()
    # The stop string that is complete first ends it, even where a longer one that begins earlier might have followed.
    for end in range(len(text) + 1):
        cuts = [at for at in (text[:end].find(s) for s in stop) if at >= 0]
        if cuts:
            text = text[: min(cuts)]
            break
    assert shown == text


def test_of_two_stop_strings_the_first_complete_one_ends_it() -> None:
    stream = TextStream(decode_bytes, stop=("a", "baa"))
    shown = [stream.push(byte) for byte in b"ba"]
    assert "".join(shown) == "b"
    assert stream.stopped
