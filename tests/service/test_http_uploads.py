"""/v1/uploads with the official client: parts in any order, checked, capped, and there after a crash."""

import hashlib
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI

from service import parts
from service.auth import Key, KeyRing, Limits
from tests.service.bench import until
from tests.service.http_fakes import Server, serving
from tests.service.test_http_durability import kill, process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("uploads")) as server:
        yield server


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client()


def begin(client: OpenAI, size_bytes: int, **options: Any) -> str:
    wanted = {"filename": "big.txt", "mime_type": "text/plain", "purpose": "user_data", **options}
    return client.uploads.create(bytes=size_bytes, **wanted).id


def add(client: OpenAI, upload_id: str, data: bytes) -> str:
    return client.uploads.parts.create(upload_id, data=data).id


def left(server: Server) -> list[Path]:
    return [path for path in (server.data_dir / "uploads" / ".parts").rglob("*") if path.is_file()]


def test_parts_become_a_file_that_is_ingested(client: OpenAI, server: Server) -> None:
    pieces = [f"piece {number} ".encode() * 1000 for number in range(6)]
    content = b"".join(pieces)
    upload = client.uploads.create(
        bytes=len(content), filename="src/../big.txt", mime_type="text/plain", purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600}, extra_body={"kind": "doc", "fidelity": "strict"},
    )  # fmt: skip
    assert (upload.object, upload.status, upload.bytes, upload.file) == ("upload", "pending", len(content), None)
    assert 3500 < upload.expires_at - upload.created_at <= 3600
    order = list(range(6))
    random.Random(3).shuffle(order)
    with ThreadPoolExecutor(3) as pool:  # in any order, at once
        added = pool.map(lambda number: client.uploads.parts.create(upload.id, data=pieces[number]), order)
        made = dict(zip(order, added, strict=True))
    assert {(part.object, part.upload_id) for part in made.values()} == {("upload.part", upload.id)}
    ids = [made[number].id for number in range(6)]
    done = client.uploads.complete(upload.id, part_ids=ids, md5=hashlib.md5(content).hexdigest())
    assert done.status == "completed"
    assert done.file is not None
    assert (done.file.filename, done.file.bytes, done.file.purpose) == ("src/big.txt", len(content), "user_data")
    assert done.file.foreword["fidelity"] == "strict"
    assert client.files.content(done.file.id).read() == content
    assert client.files.wait_for_processing(done.file.id, poll_interval=0.02).status == "processed"
    assert client.uploads.complete(upload.id, part_ids=ids).file.id == done.file.id, "completing again is no error"
    assert left(server) == []


def test_the_clients_own_helper(client: OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"0123456789" * 1000)
    done = client.uploads.upload_file_chunked(file=path, mime_type="text/plain", purpose="user_data", part_size=3000)
    assert done.file is not None
    assert client.files.content(done.file.id).read() == path.read_bytes()


def test_what_is_wrong_is_said_and_can_be_mended(client: OpenAI, server: Server) -> None:
    upload_id = begin(client, 6)
    first, second = add(client, upload_id, b"abc"), add(client, upload_id, b"def")
    wrong = [
        ({"part_ids": [first]}, "part_ids", "3 bytes, 6 were announced"),
        ({"part_ids": [first, first]}, "part_ids", "named twice"),
        ({"part_ids": [first, "part-none"]}, "part_ids", "no part 'part-none'"),
        ({"part_ids": [first, second], "md5": "0" * 32}, "md5", hashlib.md5(b"abcdef").hexdigest()),
    ]
    for options, param, message in wrong:
        with pytest.raises(BadRequestError, match=message) as error:
            client.uploads.complete(upload_id, **options)
        assert error.value.param == param
    assert not list((server.data_dir / "uploads" / ".incoming").iterdir())
    done = client.uploads.complete(upload_id, part_ids=[second, first])
    assert client.files.content(done.file.id).read() == b"defabc"


@pytest.mark.parametrize(
    ("options", "param"),
    [({"bytes": 0}, "bytes"), ({"purpose": "vision"}, "purpose"), ({"filename": ""}, "filename"), ({"x": 1}, "x")],
)
def test_impossible_uploads(server: Server, options: dict[str, Any], param: str) -> None:
    body = {"bytes": 5, "filename": "a", "mime_type": "text/plain", "purpose": "user_data", **options}
    answer = server.http.post("/v1/uploads", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_description_is_no_file(server: Server) -> None:
    """It is kept for as long as the upload is."""
    body = {"bytes": 1, "filename": "a", "mime_type": "text/plain", "purpose": "user_data", "options": " " * (4 << 20)}
    answer = server.http.post("/v1/uploads", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_a_part_is_one_file_of_at_most_64_mib(client: OpenAI, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    upload_id = begin(client, 100)
    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    with pytest.raises(APIStatusError) as error:
        add(client, upload_id, b"x" * 1001)
    assert (error.value.status_code, error.value.code) == (413, "file_too_large")
    for files in ([], [("data", ("a", b""))], [("data", ("a", b"1")), ("data", ("b", b"2"))]):
        answer = server.http.post(f"/v1/uploads/{upload_id}/parts", data={"x": "y"}, files=files or None)
        assert answer.status_code in (400, 415)
    assert left(server) == []
    client.uploads.cancel(upload_id)


def test_cancelled_uploads_take_nothing_more(client: OpenAI, server: Server) -> None:
    upload_id = begin(client, 3)
    part_id = add(client, upload_id, b"abc")
    assert client.uploads.cancel(upload_id).status == "cancelled"
    assert left(server) == []
    for attempt in (
        lambda: add(client, upload_id, b"abc"),
        lambda: client.uploads.complete(upload_id, part_ids=[part_id]),
        lambda: client.uploads.cancel(upload_id),
    ):
        with pytest.raises(BadRequestError) as error:
            attempt()
        assert error.value.code == "upload_not_pending"


def test_uploads_expire(client: OpenAI, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LIFETIME_S", 0.3)
    upload_id = begin(client, 3)
    add(client, upload_id, b"abc")
    until(lambda: server.objects.get("upload", "local", upload_id).data["status"] == "expired")
    until(lambda: not left(server))
    with pytest.raises(BadRequestError, match="expired"):
        add(client, upload_id, b"abc")


def test_caps_hold_for_parts(tmp_path: Path) -> None:
    with serving(tmp_path, upload_bytes=1000, max_upload_bytes=900) as server:
        client = server.client()
        for size_bytes, code in ((901, "file_too_large"), (1001, "file_too_large")):
            with pytest.raises(APIStatusError) as error:
                begin(client, size_bytes)
            assert error.value.code == code
        upload_id = begin(client, 800)
        ids = [add(client, upload_id, b"x" * 400) for _ in range(2)]
        with pytest.raises(APIStatusError) as error:
            add(client, upload_id, b"x" * 300)
        assert (error.value.status_code, error.value.code) == (507, "storage_full")
        with pytest.raises(APIStatusError):
            client.files.create(file=("a", b"x" * 300), purpose="user_data")
        assert client.uploads.complete(upload_id, part_ids=ids).file.bytes == 800


def test_a_tenants_uploads_are_its_own(tmp_path: Path) -> None:
    def key(name: str, **limits: int) -> Key:
        return Key(sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=name, limits=Limits(**limits))

    with serving(tmp_path, keys=KeyRing([key("ann", stored_bytes=500), key("bob")])) as server:
        ann, bob = server.client("ann"), server.client("bob")
        upload_id = begin(ann, 400)
        part_id = add(ann, upload_id, b"x" * 400)
        for attempt in (
            lambda: add(bob, upload_id, b"x"),
            lambda: bob.uploads.complete(upload_id, part_ids=[part_id]),
            lambda: bob.uploads.cancel(upload_id),
        ):
            with pytest.raises(NotFoundError) as error:
                attempt()
            assert error.value.code == "upload_not_found"
        for attempt in (lambda: begin(ann, 101), lambda: add(ann, upload_id, b"x" * 101)):
            with pytest.raises(APIStatusError) as refused:
                attempt()
            assert (refused.value.status_code, refused.value.code) == (429, "insufficient_quota")
            assert refused.value.response.headers["x-should-retry"] == "false"
        begin(bob, 101)
        assert ann.uploads.complete(upload_id, part_ids=[part_id]).file.bytes == 400


def test_parts_survive_kill_9(tmp_path: Path) -> None:
    with process(tmp_path) as (server, url), httpx.Client(base_url=url, timeout=60) as http:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        upload_id = begin(client, 200_000)
        first = add(client, upload_id, b"a" * 100_000)

        def half() -> Iterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="data"; filename="a"\r\n\r\n' + b"x" * 70_000
            incoming = tmp_path / "data" / "uploads" / ".incoming"
            until(lambda: [path for path in incoming.glob("*/0") if path.stat().st_size])
            kill(server)
            yield b"x"

        with pytest.raises(httpx.TransportError):
            http.post(
                f"/v1/uploads/{upload_id}/parts",
                content=half(),
                headers={"content-type": "multipart/form-data; boundary=b"},
            )
        client.close()
    with serving(tmp_path) as again:
        client = again.client()
        second = add(client, upload_id, b"b" * 100_000)
        started = time.monotonic()
        done = client.uploads.complete(upload_id, part_ids=[first, second])
        assert time.monotonic() - started < 30
        assert client.files.content(done.file.id).read() == b"a" * 100_000 + b"b" * 100_000
        assert not list((again.data_dir / "uploads" / ".incoming").iterdir())
