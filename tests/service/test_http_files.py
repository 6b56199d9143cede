"""/v1/files with the official client against the real server and store; only the worker is made up."""

import io
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI, UnprocessableEntityError

from tests.service.http_fakes import Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("files")) as server:
        yield server


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client()


def processed(client: OpenAI, name: str, data: bytes, **options: object) -> str:
    file = client.files.create(file=(name, data), purpose="user_data", **options)  # type: ignore[arg-type]
    assert client.files.wait_for_processing(file.id, poll_interval=0.02).status == "processed"
    return file.id


def test_upload_wait_retrieve_content_delete(client: OpenAI) -> None:
    before = int(time.time())
    created = client.files.create(file=("Ünïcode name.txt", b"some text"), purpose="user_data")
    assert created.id.startswith("file-")
    assert (created.object, created.bytes, created.filename) == ("file", 9, "Ünïcode name.txt")
    assert (created.purpose, created.status, created.expires_at) == ("user_data", "uploaded", None)
    assert before <= created.created_at <= time.time()
    assert client.files.wait_for_processing(created.id, poll_interval=0.02).status == "processed"
    assert client.files.content(created.id).read() == b"some text"
    deleted = client.files.delete(created.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (created.id, True, "file")
    for call in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(NotFoundError) as error:
            call(created.id)
        assert error.value.code == "file_not_found"


def test_extra_fields_and_expiry(client: OpenAI, server: Server) -> None:
    base = processed(client, "base.txt", b"base")
    file = client.files.create(
        file=("next.txt", b"next"),
        purpose="assistants",
        expires_after={"anchor": "created_at", "seconds": 3600},
        extra_body={
            "kind": "repo",
            "priority": "2",
            "fidelity": "strict",
            "base": base,
            "pin": "true",
            "kv_ttl_s": "60",
        },
    )
    assert file.expires_at == file.created_at + 3600
    record = server.documents.file("local", file.id)
    assert (record.kind, record.priority, record.fidelity, record.base) == ("repo", 2, "strict", base)
    assert (record.pinned, record.kv_ttl_s) == (True, 60.0)
    job = server.queue.get(record.ingest_job or "")
    assert (job.kind, job.priority, job.payload["file_id"]) == ("ingest", 2, file.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "user_data", "kind": "novel"}, "kind"),
        ({"purpose": "user_data", "fidelity": "best"}, "fidelity"),
        ({"purpose": "user_data", "priority": "high"}, "priority"),
        ({"purpose": "user_data", "base": "file-none"}, "base"),
        ({"purpose": "user_data", "colour": "red"}, "colour"),
        ({"purpose": "user_data", "kv_ttl_s": "inf"}, "kv_ttl_s"),
        ({"purpose": "user_data", "options": '{"base": "\\ud800"}'}, "options"),
        ({"purpose": "user_data", "options": "[" * 60_000}, "options"),
        (
            {"purpose": "user_data", "expires_after[anchor]": "now", "expires_after[seconds]": "60"},
            "expires_after[anchor]",
        ),
        (
            {"purpose": "user_data", "expires_after[anchor]": "created_at", "expires_after[seconds]": "0"},
            "expires_after[seconds]",
        ),
        ({}, "purpose"),
    ],
)
def test_wrong_fields_are_named(server: Server, fields: dict[str, str], param: str) -> None:
    answer = server.http.post("/v1/files", data=fields, files={"file": ("a.txt", b"x")})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert not list((server.data_dir / "uploads" / ".incoming").iterdir())


def test_fields_may_follow_the_file(server: Server) -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nhello\r\n'
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--b--\r\n'
    )
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = server.http.post("/v1/files", content=body, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["bytes"] == 5


def test_empty_upload(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as error:
        client.files.create(file=("empty.txt", b""), purpose="user_data")
    assert error.value.code == "empty_input"


def test_batch_is_stored_and_never_ingested(client: OpenAI, server: Server) -> None:
    file = client.files.create(file=("requests.jsonl", b"{}\n"), purpose="batch")
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert server.documents.file("local", file.id).ingest_job is None
    messages: Any = [{"role": "user", "content": [{"type": "file", "file": {"file_id": file.id}}]}]
    with pytest.raises(BadRequestError, match="only stored"):
        client.chat.completions.create(model="default", messages=messages)


def test_failed_ingest_is_an_error_status_with_its_reason(client: OpenAI) -> None:
    file = client.files.create(file=("a.txt", b"BAD bytes"), purpose="user_data")
    failed = client.files.wait_for_processing(file.id, poll_interval=0.02)
    assert (failed.status, failed.status_details) == ("error", "it is damaged")


def test_pages_by_cursor(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = server.client()
        ids = [client.files.create(file=(f"{n}.txt", b"x"), purpose="user_data").id for n in range(5)]
        stored = client.files.create(file=("b.jsonl", b"x"), purpose="batch").id
        assert [file.id for file in client.files.list(limit=2, order="asc")] == [*ids, stored]
        assert [file.id for file in client.files.list()] == [stored, *reversed(ids)]
        assert [file.id for file in client.files.list(purpose="batch")] == [stored]
        first = client.files.list(limit=2, order="asc", purpose="user_data")
        assert [file.id for file in first.data] == ids[:2]
        assert first.has_more
        last = client.files.list(limit=2, order="asc", purpose="user_data", after=ids[3])
        assert [file.id for file in last.data] == ids[4:]
        assert not last.has_more
        with pytest.raises(NotFoundError):
            client.files.list(after="file-none")
        for wrong in ({"limit": 0}, {"order": "up"}):
            with pytest.raises(BadRequestError) as error:
                client.files.list(**wrong)  # type: ignore[arg-type]
            assert error.value.param == next(iter(wrong))


def test_expired_handle_is_gone(client: OpenAI, server: Server) -> None:
    file_id = processed(client, "old.txt", b"old")
    server.documents.update_file(file_id, {"expires_at": time.time() - 1})
    with pytest.raises(NotFoundError):
        client.files.retrieve(file_id)


def test_several_files_come_back_as_one_zip(server: Server, client: OpenAI) -> None:
    parts = [("file", ("src/a.py", b"a = 1")), ("file", ("../../b.py", b"b = 2"))]
    document = server.http.post("/v1/documents", files=parts).json()
    archive = zipfile.ZipFile(io.BytesIO(client.files.content(document["id"]).read()))
    assert {name: archive.read(name) for name in archive.namelist()} == {"src/a.py": b"a = 1", "b.py": b"b = 2"}
    answer = server.http.post("/v1/files", data={"purpose": "user_data"}, files=parts)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")


def test_same_idempotency_key_is_the_same_file(client: OpenAI, server: Server) -> None:
    headers = {"Idempotency-Key": "k1"}
    first = client.files.create(file=("a.txt", b"one"), purpose="user_data", extra_headers=headers)
    again = client.files.create(file=("a.txt", b"one"), purpose="user_data", extra_headers=headers)
    other = client.files.create(file=("a.txt", b"one"), purpose="user_data", extra_headers={"Idempotency-Key": "k2"})
    assert first.id == again.id != other.id
    client.files.wait_for_processing(first.id, poll_interval=0.02)
    client.files.delete(first.id)
    with pytest.raises(UnprocessableEntityError) as error:
        client.files.create(file=("a.txt", b"two"), purpose="user_data", extra_headers=headers)
    assert error.value.code == "idempotency_key_reused"


def test_too_large_by_length_and_by_bytes(tmp_path: Path) -> None:
    limit = 8 << 20
    with serving(tmp_path, max_upload_bytes=limit) as server:
        with pytest.raises(APIStatusError) as error:
            server.client().files.create(file=("big", b"x" * (limit + (5 << 20))), purpose="user_data")
        assert (error.value.status_code, error.value.code) == (413, "file_too_large")
        assert error.value.response.headers["x-should-retry"] == "false"

        def endless() -> Iterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(100):
                yield b"x" * (1 << 20)

        headers = {"content-type": "multipart/form-data; boundary=b"}
        answer = server.http.post("/v1/files", content=endless(), headers=headers)
        assert answer.status_code == 413
        assert not list((server.data_dir / "uploads" / ".incoming").iterdir())
        assert server.client().files.create(file=("ok", b"x" * (1 << 20)), purpose="user_data").bytes == 1 << 20


def test_upload_cap_and_disk_floor(tmp_path: Path) -> None:
    with serving(tmp_path / "cap", upload_bytes=1000) as server:
        client = server.client()
        kept = client.files.create(file=("a", b"x" * 900), purpose="user_data")
        with pytest.raises(APIStatusError) as error:
            client.files.create(file=("b", b"x" * 200), purpose="user_data")
        assert (error.value.status_code, error.value.code) == (507, "storage_full")
        assert "1000" in error.value.message
        client.files.delete(kept.id)
        client.files.create(file=("b", b"x" * 200), purpose="user_data")
    with serving(tmp_path / "floor", disk_floor_bytes=1 << 62) as server, pytest.raises(APIStatusError) as error:
        server.client().files.create(file=("a", b"x"), purpose="user_data")
    assert (error.value.status_code, error.value.code) == (507, "storage_full")


def test_parallel_uploads_are_all_kept(server: Server, client: OpenAI) -> None:
    data = [bytes([65 + n]) * 100_000 for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda d: client.files.create(file=("f.txt", d), purpose="user_data").id, data))
    assert [client.files.content(file_id).read() for file_id in ids] == data


@pytest.mark.parametrize(
    ("content_type", "body", "status", "code"),
    [
        ("application/json", b"{}", 415, "unsupported_media_type"),
        ("", b"x", 415, "unsupported_media_type"),
        ("multipart/form-data", b"x", 415, "unsupported_media_type"),
        ("multipart/form-data; boundary=b", b"nonsense", 400, "invalid_multipart"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf',
            400,
            "invalid_multipart",
        ),
        ("multipart/form-data; boundary=b", b"--b\r\nX: y\r\n\r\nx\r\n--b--\r\n", 400, "invalid_multipart"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nx\r\n--b--\r\n',
            400,
            "missing_required_parameter",
        ),
        (f"multipart/form-data; boundary={'b' * 300}", b"--b--", 400, "invalid_multipart"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="' + b"n" * 100_000 + b'"\r\n\r\nx\r\n--b--\r\n',
            400,
            "invalid_multipart",
        ),
    ],
)
def test_damaged_bodies(server: Server, content_type: str, body: bytes, status: int, code: str) -> None:
    answer = server.http.post("/v1/files", content=body, headers={"content-type": content_type})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert not list((server.data_dir / "uploads" / ".incoming").iterdir())


def test_expired_handles_are_not_listed(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = server.client()
        ids = [client.files.create(file=(f"{n}.txt", b"x"), purpose="user_data").id for n in range(4)]
        server.documents.update_file(ids[1], {"expires_at": time.time() - 1})
        assert [file.id for file in client.files.list(limit=1, order="asc").data] == ids[:1]
        assert [file.id for file in client.files.list(limit=2, order="asc")] == [ids[0], *ids[2:]]
