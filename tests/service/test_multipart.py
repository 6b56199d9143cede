"""Multipart bodies cut anywhere give the same parts; names lose what could lead out of a folder."""

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.errors import InvalidRequest
from service.multipart import MAX_FIELD_BYTES, MAX_FIELDS, PartReader
from service.uploads import clean_name

BOUNDARY = b"frontier"
# Pieces that look like boundaries are what a parser can go wrong on.
CONTENT = st.lists(
    st.sampled_from([b"\r\n", b"--", b"--frontier", b"\r\n--front", b"\r", b"\n", b"\0\xff", b"text", b"frontier--"]),
    max_size=12,
).map(b"".join)


def body_of(files: list[bytes], fields: dict[str, str]) -> bytes:
    parts = [
        b'--frontier\r\nContent-Disposition: form-data; name="file"; filename="f%d"\r\n' % number
        + b"Content-Type: text/plain\r\n\r\n%b\r\n" % content
        for number, content in enumerate(files)
    ]
    parts += [
        f'--frontier\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    return b"".join(parts) + b"--frontier--\r\n"


def read(folder: Path, pieces: list[bytes]) -> tuple[list[bytes], dict[str, str]]:
    paths: list[Path] = []
    sizes: list[int] = []

    def new_file(filename: str) -> Path:
        assert filename == f"f{len(paths)}"
        paths.append(folder / filename)
        return paths[-1]

    reader = PartReader(BOUNDARY, new_file=new_file, on_bytes=sizes.append)
    try:
        for piece in pieces:
            reader.feed(piece)
        reader.finish()
    finally:
        reader.close()
    contents = [path.read_bytes() for path in paths]
    assert sum(sizes) == sum(map(len, contents))
    return contents, reader.fields


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(CONTENT.filter(lambda content: b"\r\n--frontier" not in b"\r\n" + content), min_size=1, max_size=3),
    fields=st.dictionaries(st.sampled_from(["kind", "purpose", "ä"]), st.text(alphabet="aß€ ", max_size=5)),
    cuts=st.lists(st.integers(min_value=1, max_value=400), max_size=8),
)
def test_cut_anywhere(tmp_path: Path, files: list[bytes], fields: dict[str, str], cuts: list[int]) -> None:
    body = body_of(files, fields)
    edges = sorted({0, *(cut for cut in cuts if cut < len(body)), len(body)})
    pieces = [body[start:end] for start, end in itertools.pairwise(edges)]
    assert read(tmp_path, pieces) == (files, fields)
    assert read(tmp_path, [bytes([byte]) for byte in body]) == (files, fields)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"kind": "x" * (MAX_FIELD_BYTES + 1)}, "invalid_value"),
        ({f"field{n}": "" for n in range(MAX_FIELDS + 1)}, "too_many_fields"),
    ],
)
def test_fields_are_bounded(tmp_path: Path, fields: dict[str, str], code: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read(tmp_path, [body_of([], fields)])
    assert error.value.code == code


@pytest.mark.parametrize(
    ("given_name", "kept"),
    [
        ("a.txt", "a.txt"),
        ("src/lib/a.py", "src/lib/a.py"),
        ("../../etc/passwd", "etc/passwd"),
        ("/etc/passwd", "etc/passwd"),
        ("C:\\Users\\me\\deal.docx", "Users/me/deal.docx"),
        ("a\0b\r\n\x1b[31m.txt", "ab[31m.txt"),
        ("Vertrag Ä‮.pdf", "Vertrag Ä.pdf"),
        ("..", "upload"),
        ("", "upload"),
    ],
)
def test_names(given_name: str, kept: str) -> None:
    assert clean_name(given_name) == kept
    assert len(clean_name("x" * 1000)) == 255
