"""A document's own words by tokens and by lines, and recall by tokens."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from service.auth import Key, KeyRing
from service.documents.records import apply_changes
from service.ingest.passage import MAX_TOKENS, OutsideDocument, lines, passage
from service.queue.base import RecordChange
from tests.service.http_fakes import Server, serving

FIRST = "alpha\nbeta é\ngamma\n"
SECOND = "one\ntwo\nthree"
PAGES = ("on the first\npage\n", "on the\nsecond")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One token a byte; each file behind a header, the pages of the last one numbered."""
    text, files = "", []
    for path, body in (("a.py", FIRST), ("b.py", SECOND)):
        text += f"=== {path} ===\n"
        start = len(text.encode())
        text += body
        files.append({"path": path, "status": "included", "token_start": start, "token_end": len(text.encode())})
    copy = {**files[0], "path": "copy.py", "duplicate_of": "a.py"}
    start, pages = len(text.encode()), []
    for number, body in enumerate(PAGES, 1):
        begin = len(text.encode())
        text += body
        pages.append({"page": number, "label": "iv", "token_start": begin, "token_end": len(text.encode())})
    paged = {"path": "c.pdf", "status": "included", "token_start": start, "token_end": len(text.encode())}
    skipped = {"path": "d.bin", "status": "skipped", "reason": "binary"}
    rows = [copy, *files, {**paged, "pages": pages}, skipped]
    (tmp_path / "manifest.json").write_text(json.dumps({"files": rows}))
    (tmp_path / "document.txt").write_text(text)
    np.save(tmp_path / "offsets.npy", np.arange(len(text.encode()) + 1, dtype=np.uint64))
    return tmp_path


def tokens_of(folder: Path, words: str) -> tuple[int, int]:
    at = (folder / "document.txt").read_bytes().index(words.encode())
    return at, at + len(words.encode())


def test_a_passage_and_what_stands_around_it(folder: Path) -> None:
    start, end = tokens_of(folder, "eta")
    found = passage(folder, start, end, context_lines=1)
    assert (found.file, found.page, found.line, found.first_line) == ("a.py", None, 2, 1)
    assert (found.before, found.text, found.after) == ("alpha\nb", "eta", " é\ngamma\n")
    assert (found.token_start, found.token_end, found.more) == (start, end, False)
    alone = passage(folder, start, end, context_lines=0)
    assert (alone.before, alone.after, alone.first_line, alone.more) == ("b", " é\n", 2, True)


def test_half_a_character_brings_the_other_half(folder: Path) -> None:
    start, end = tokens_of(folder, "é")
    for first, last in ((start, end - 1), (start + 1, end)):
        assert passage(folder, first, last, context_lines=0).text == "é"


def test_a_passage_ends_with_its_file_and_its_page(folder: Path) -> None:
    start, _ = tokens_of(folder, "gamma")
    found = passage(folder, start, start + 30, context_lines=5)
    assert (found.text, found.after, found.more) == ("gamma\n", "", False)
    start, end = tokens_of(folder, "second")
    found = passage(folder, start, end, context_lines=5)
    assert (found.file, found.page, found.page_label, found.line) == ("c.pdf", 2, "iv", 2)
    assert found.before == "on the\n"


@pytest.mark.parametrize(("start", "end"), [(0, 4), (-1, 3), (5, 5), (9, 3), (10**9, 10**9 + 1), (20, 21 + MAX_TOKENS)])
def test_tokens_of_no_file_are_refused(folder: Path, start: int, end: int) -> None:
    with pytest.raises(OutsideDocument):
        passage(folder, start, end, context_lines=1)


def test_lines_of_a_file(folder: Path) -> None:
    found = lines(folder, "b.py", count=2)
    assert (found.text, found.first_line, found.more) == ("one\ntwo\n", 1, True)
    assert (found.token_start, found.token_end) == tokens_of(folder, "one\ntwo\n")
    rest = lines(folder, "b.py", line=3, count=50)
    assert (rest.text, rest.line, rest.more) == ("three", 3, False)
    assert lines(folder, "copy.py", line=2, count=1).text == "beta é\n"
    assert lines(folder, "c.pdf", page=2, count=9).text == PAGES[1]
    for wrong in ({"file": "d.bin"}, {"file": "x"}, {"file": "c.pdf", "page": 3}, {"file": "b.py", "line": 4}):
        with pytest.raises(OutsideDocument):
            lines(folder, count=1, **wrong)  # type: ignore[arg-type]


# --- over HTTP -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = KeyRing([Key(sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=name) for name in ("ann", "bob")])
    with serving(tmp_path_factory.mktemp("passages"), keys=keys) as server:
        yield server


def upload(server: Server, text: str) -> str:
    client = server.client("ann")
    file = client.files.create(file=("a.txt", text.encode()), purpose="user_data")
    client.files.wait_for_processing(file.id, poll_interval=0.02)
    return file.id


def get(server: Server, path: str, key: str = "ann", **query: object) -> tuple[int, dict]:
    answer = server.http.get(f"/v1/documents/{path}", params=query, headers={"authorization": f"Bearer {key}"})  # type: ignore[arg-type]
    return answer.status_code, answer.json()


def test_a_citation_opens_its_passage(server: Server) -> None:
    text = "first line\nthe clause that matters\nlast line\n"
    file_id = upload(server, text)
    _, located = get(server, f"{file_id}/locate", text="clause that")
    place = located["data"][0]
    tokens = {"token_start": place["token_start"], "token_end": place["token_end"]}
    status, found = get(server, f"{file_id}/passage", **tokens, context=1)
    assert (status, found["filename"], found["line"], found["text"]) == (200, "a.txt", place["line"], "clause that")
    assert found["before"] + found["text"] + found["after"] == text
    assert get(server, f"{file_id}/passage", file="a.txt", line=2, lines=1)[1]["text"] == "the clause that matters\n"
    for path in (f"{file_id}/passage", f"{file_id}/recall"):
        assert get(server, path, key="bob", **tokens)[0] == 404
        assert get(server, path, key="nobody", **tokens)[0] == 401


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"token_start": 1},
        {"token_start": 5, "token_end": 2},
        {"token_start": -1, "token_end": 2},
        {"token_start": 10**15, "token_end": 10**15 + 1},
        {"file": "../a"},
        {"file": "a.txt", "lines": 0},
        {"file": "a.txt", "line": 9**9},
    ],
)
def test_what_is_no_passage_is_a_bad_request(server: Server, query: dict[str, object]) -> None:
    status, body = get(server, f"{upload(server, 'short')}/passage", **query)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


def test_recall_is_told_by_the_documents_own_tokens(server: Server) -> None:
    file_id = upload(server, "x" * 6000)
    document = get(server, file_id)[1]
    head = server.model.prompts.head_length
    measured = [
        {"start": 0, "end": 4096, "density": 1.0, "mean": None, "worst": None},
        {"start": 4096, "end": 6000 + head + 3, "density": 0.5, "mean": 0.97, "worst": 0.9},
    ]
    prefill = f"{document['document_id']}:default"
    length = server.model.prompts.prefix_length([document["num_tokens"]])

    def keep(**fields: object) -> dict:
        with server.database.write(durable=False) as connection:
            apply_changes(connection, [RecordChange("prefills", prefill, fields)])
        return get(server, f"{file_id}/recall")[1]

    told = keep(segments=measured, num_tokens=length)
    assert told["recall"]["target"] == 0.95
    assert [(row["token_start"], row["token_end"], row["recall"], row["density"]) for row in told["data"]] == [
        (0, 4096 - head, None, 1.0),
        (4096 - head, document["num_tokens"], 0.97, 0.5),
    ]
    assert told["data"][1]["worst"] == 0.9
    # Made with another template, nobody knows how far its tokens were shifted.
    assert keep(num_tokens=length + 1)["data"] == []
    assert keep(segments=None, num_tokens=length)["data"] == []
