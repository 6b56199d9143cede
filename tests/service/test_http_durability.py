"""What a 200 promised survives kill -9; what was never promised leaves nothing behind."""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.database import Database
from service.documents.base import FileRecord
from service.documents.sqlite import SqliteDocuments
from service.uploads import UploadStore
from tests.service.http_fakes import serving


@contextlib.contextmanager
def process(folder: Path, *options: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    command = [sys.executable, "-m", "tests.service.http_process", str(folder / "data"), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server, server.stdout.readline().strip()
        finally:
            server.kill()


def kill(server: "subprocess.Popen[str]") -> None:
    server.send_signal(signal.SIGKILL)
    server.wait()


def test_acknowledged_uploads_survive_kill_9(tmp_path: Path) -> None:
    """Four clients upload without pause; the server dies in the middle of it."""
    acknowledged: dict[str, bytes] = {}

    def upload(http: httpx.Client, number: int) -> None:
        with contextlib.suppress(httpx.TransportError):
            for turn in range(10_000):
                data = f"upload {number}.{turn} ".encode() * 5000
                answer = http.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("a.txt", data)})
                acknowledged[answer.json()["id"]] = data

    with process(tmp_path) as (server, url), httpx.Client(base_url=url, timeout=60) as http:
        threads = [threading.Thread(target=upload, args=(http, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        while len(acknowledged) < 12 and any(thread.is_alive() for thread in threads):
            time.sleep(0.01)
        kill(server)
        for thread in threads:
            thread.join()

    # An upload killed between its folder and the lock in it is swept only once it can't be a living writer's.
    for folder in (tmp_path / "data" / "uploads" / ".incoming").iterdir():
        os.utime(folder, (0, 0))
    with serving(tmp_path) as again:
        client = again.client()
        for file_id, data in acknowledged.items():
            assert client.files.content(file_id).read() == data
            assert client.files.wait_for_processing(file_id, poll_interval=0.02).status == "processed"
        known = {file.id for file in client.files.list()}
        folders = {path.name for path in (again.data_dir / "uploads").iterdir()} - {".incoming"}
        assert folders == known >= acknowledged.keys()
        assert not list((again.data_dir / "uploads" / ".incoming").iterdir())


def test_half_an_upload_is_swept_at_the_next_start(tmp_path: Path) -> None:
    incoming = tmp_path / "data" / "uploads" / ".incoming"
    with process(tmp_path) as (server, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n"
                b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
                b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 100_000
            )
            deadline = time.monotonic() + 30
            while not [path for path in incoming.glob("*/0") if path.stat().st_size]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            kill(server)
    assert list(incoming.iterdir())
    with serving(tmp_path) as again:
        assert not list(incoming.iterdir())
        assert again.client().files.list().data == []


def test_client_that_leaves_in_the_middle_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path) as server:
        incoming = server.data_dir / "uploads" / ".incoming"

        def half() -> Iterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 100_000
            while not [path for path in incoming.glob("*/0") if path.stat().st_size]:
                time.sleep(0.01)
            raise ConnectionError

        headers = {"content-type": "multipart/form-data; boundary=b"}
        with pytest.raises(ConnectionError):
            server.http.post("/v1/files", content=half(), headers=headers)
        deadline = time.monotonic() + 30
        while list(incoming.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not caplog.records


@pytest.fixture
def documents(tmp_path: Path) -> Iterator[SqliteDocuments]:
    database = Database(tmp_path / "db.sqlite")
    yield SqliteDocuments(database)
    database.close()


def store(tmp_path: Path, documents: SqliteDocuments) -> UploadStore:
    return UploadStore(tmp_path, documents, max_upload_bytes=1000, cap_bytes=1000, disk_floor_bytes=0)


def record(file_id: str) -> FileRecord:
    return FileRecord(
        id=file_id, tenant="t", filename="a", purpose="user_data", size_bytes=1, created_at=0.0, expires_at=None,
        kind="auto", fidelity="default", priority=0, base=None, pinned=False, kv_ttl_s=None, sources=[],
        status="uploaded", status_details=None, error=None, ingest_job=None, document_id=None,
    )  # fmt: skip


def leave(folder: Path, tenant: str = "t") -> Path:
    """An upload as a dead process leaves it."""
    folder.mkdir(parents=True)
    (folder / "0").write_bytes(b"x")
    (folder / "owner").write_text(tenant)
    return folder


def test_sweep_removes_what_no_record_names(tmp_path: Path, documents: SqliteDocuments) -> None:
    uploads = store(tmp_path, documents)
    half = leave(tmp_path / "uploads" / ".incoming" / "file-1")
    unrecorded = leave(tmp_path / "uploads" / "file-2")
    recorded = leave(tmp_path / "uploads" / "file-3")
    foreign = leave(tmp_path / "uploads" / "file-4", tenant="u")
    finished = tmp_path / "uploads" / "file-5"
    shutil.copytree(recorded, finished)
    (finished / "owner").unlink()
    unlocked = leave(tmp_path / "uploads" / ".incoming" / "file-6")
    (unlocked / "owner").unlink()
    os.utime(unlocked, (0, 0))
    documents.create_file(record("file-3"))
    documents.create_file(record("file-4"))
    assert uploads.sweep() == 3
    assert [path.exists() for path in (half, unrecorded, recorded, foreign, finished)] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert not (recorded / "owner").exists()


def test_sweep_leaves_what_another_process_is_writing(tmp_path: Path, documents: SqliteDocuments) -> None:
    uploads = store(tmp_path, documents)
    folder = leave(tmp_path / "uploads" / ".incoming" / "file-1")
    with (folder / "owner").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert uploads.sweep() == 0
        assert folder.exists()
    assert uploads.sweep() == 1


async def test_uploads_on_their_way_count_against_the_cap(tmp_path: Path, documents: SqliteDocuments) -> None:
    uploads = store(tmp_path, documents)
    async with uploads.open("file-1", "t") as upload:
        await uploads.receive_bytes(upload, "a", b"x" * 600)
        assert uploads.used_bytes() == 600
    assert uploads.used_bytes() == 0


async def test_record_that_fails_takes_the_bytes_with_it(tmp_path: Path, documents: SqliteDocuments) -> None:
    uploads = store(tmp_path, documents)

    def fail() -> None:
        raise OSError("disk full")

    async def take() -> None:
        async with uploads.open("file-1", "t") as upload:
            await uploads.receive_bytes(upload, "a", b"x")
            await uploads.commit(upload, fail)

    with pytest.raises(OSError, match="disk full"):
        await take()
    assert [path.name for path in (tmp_path / "uploads").iterdir()] == [".incoming"]
