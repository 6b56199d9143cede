"""Bad input and broken storage over real HTTP: a clear error in the OpenAI shape, nothing lost, service goes on."""

import io
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError

from tests.end_to_end.server import Server, free_port, running
from tests.end_to_end.test_main_job import file_part, stream, text_part, upload
from tests.end_to_end.text import library_text, question, with_needles


def zip_of(entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return buffer.getvalue()


BAD_UPLOADS = {
    "unsupported_format": ("movie.mkv", b"\x1aE\xdf\xa3" + os.urandom(4096)),
    "archive_bomb": ("bomb.zip", zip_of({f"{n}.txt": b"\0" * 60_000_000 for n in range(8)})),
    "archive_corrupt": ("cut.zip", zip_of({"a.py": library_text(30_000).encode()})[:4000]),
    "document_corrupt": ("cut.pdf", b"%PDF-1.7\n1 0 obj\n<</Type/Catalog"),
}


@pytest.mark.parametrize("code", BAD_UPLOADS)
def test_bad_upload_ends_as_an_error_with_its_code(server: Server, code: str) -> None:
    client = server.client()
    name, data = BAD_UPLOADS[code]
    file_id = client.files.create(file=(name, data), purpose="user_data").id
    document = server.wait_for(file_id, timeout_s=60)
    assert (document["state"], document["error"]["code"]) == ("error", code)
    assert document["error"]["message"]
    handle = client.files.retrieve(file_id)
    assert handle.status == "error"
    assert handle.status_details
    with pytest.raises(APIStatusError) as refused:
        stream(client, [file_part(file_id), text_part("What is it?")])
    assert refused.value.status_code in (400, 422)
    assert refused.value.body["code"] == code


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{not json", 400),
        ("/v1/chat/completions", b'{"model": "no-such-model", "messages": [{"role": "user", "content": "x"}]}', 404),
        ("/v1/nothing", b"{}", 404),
    ],
)
def test_bad_requests_have_the_openai_error_shape(server: Server, path: str, body: bytes, status: int) -> None:
    answer = httpx.post(server.url + path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]


def test_empty_upload_and_unknown_file(server: Server) -> None:
    client = server.client()
    with pytest.raises(APIStatusError) as empty:
        client.files.create(file=("empty.txt", b""), purpose="user_data")
    assert empty.value.status_code == 400
    with pytest.raises(APIStatusError) as unknown:
        stream(client, [file_part("file-" + "0" * 24), text_part("What?")])
    assert unknown.value.status_code == 404


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Documents of 7,000 tokens are allowed, KV of about 1,300 fits."""
    with running(tmp_path_factory.mktemp("narrow") / "data", max_document_tokens=7000, kv_disk_bytes=60_000_000) as it:
        yield it


def test_document_longer_than_allowed_says_both_numbers(narrow: Server) -> None:
    file_id = narrow.client().files.create(file=("long.py", library_text(40_000).encode()), purpose="user_data").id
    error = narrow.wait_for(file_id)["error"]
    assert error["code"] == "context_length_exceeded"
    assert "7000" in error["message"].replace(",", "")


def test_kv_that_cannot_fit_is_refused_and_the_worker_lives(narrow: Server) -> None:
    client = narrow.client()
    text, _ = with_needles(library_text(16_000))
    file_id = client.files.create(file=("big.py", text.encode()), purpose="user_data").id
    error = narrow.wait_for(file_id)["error"]
    assert error["code"] == "storage_full"
    assert any(character.isdigit() for character in error["message"])
    small, needles = with_needles(library_text(2_000), 1)
    key, number = next(iter(needles.items()))
    answer, _ = stream(client, [file_part(upload(client, "small.py", small)), text_part(question(key))])
    assert number in answer


def test_corrupted_kv_is_recomputed_and_counted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    text, needles = with_needles(library_text(6_000), 1, seed=9)
    with running(data) as server:
        file_id = upload(server.client(), "short.py", text)
    damaged = 0
    for path in (data / "kv").rglob("*"):
        if path.is_file() and path.stat().st_size > 1_000_000:
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0x40]))
            damaged += 1
    assert damaged
    with running(data) as server:
        key, number = next(iter(needles.items()))
        answer, _ = stream(server.client(), [file_part(file_id), text_part(question(key))])
        assert number in answer
        assert server.metric("foreword_kv_checksum_failures_total") >= 1


def test_cancelled_prefill_and_client_gone_leave_the_worker_free(server: Server) -> None:
    client = server.client()
    text, _ = with_needles(library_text(36_000, skip=60), 1, seed=10)
    file_id = client.files.create(file=("withdrawn.py", text.encode()), purpose="user_data").id
    server.wait_for(file_id, progress=0.05)
    client.files.delete(file_id)

    small, in_small = with_needles(library_text(6_000, skip=70), 1, seed=11)
    small_id = upload(client, "small.py", small)
    body = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": [file_part(small_id), text_part("Write a very long story.")]}],
        "stream": True,
        "max_tokens": 4000,
    }
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    started = time.monotonic()
    key, number = next(iter(in_small.items()))
    answer, _ = stream(client, [file_part(small_id), text_part(question(key))])
    assert number in answer
    deadline = started + 30
    while server.metric("foreword_jobs", state="running") > 0:
        assert time.monotonic() < deadline, "work that nobody waits for goes on"
        time.sleep(0.1)


def test_second_server_on_one_data_folder_is_refused(server: Server) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "foreword", "serve", "--port", str(free_port())],
        env={**os.environ, "FOREWORD_DATA_DIR": str(server.data_dir)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 2
    assert json.loads(second.stderr.strip().splitlines()[-1])["error"]["code"] == "data_dir_locked"


def test_missing_model_folder_is_named(tmp_path: Path) -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "foreword", "serve", "--port", str(free_port())],
        env={
            **os.environ,
            "FOREWORD_DATA_DIR": str(tmp_path / "data"),
            "FOREWORD_MODEL": str(tmp_path / "no-model"),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 2
    error = json.loads(refused.stderr.strip().splitlines()[-1])["error"]
    assert error["code"] == "model_error"
    assert "no-model" in error["message"]


def test_device_that_is_not_there_ends_the_server(tmp_path: Path) -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "foreword", "serve", "--port", str(free_port())],
        env={**os.environ, "FOREWORD_DATA_DIR": str(tmp_path / "data"), "FOREWORD_DEVICE": "abacus"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert refused.returncode == 2
    assert json.loads(refused.stderr.strip().splitlines()[-1])["error"]["code"] == "worker_unusable"
    assert "abacus" in refused.stderr


def test_keys_and_the_loopback_rule(tmp_path: Path) -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "foreword", "serve", "--host", "0.0.0.0", "--port", str(free_port())],
        env={**os.environ, "FOREWORD_DATA_DIR": str(tmp_path / "open")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 2
    assert "insecure" in refused.stderr
