"""`serve` as processes: supervisor, worker, kill -9, shutdown. The engine is fake, everything else is real."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.database import Database, database_path
from service.queue.base import NewJob
from service.queue.sqlite_queue import SqliteQueue
from tests.service.bench import until
from tests.service.prompt_models import save_folder

ROOT = Path(__file__).parents[2]


class Served:
    """One server process group on a data folder, as `foreword serve` starts it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.data_dir = folder / "data"
        self.log = folder / "serve.log"
        model = save_folder(folder / "model", "chatml")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        values = {
            "data_dir": self.data_dir,
            "model": model,
            "port": self.port,
            "lease_s": 3.0,
            "disk_floor_bytes": 0,
            "ingest_timeout_s": 60,
            **settings,
        }
        self.env = {**os.environ, **{f"FOREWORD_{name.upper()}": str(value) for name, value in values.items()}}
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(timeout=60)

    def start(self) -> "Served":
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.service.fake_serve"],
                env=self.env,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self.ready, 60)
        return self

    def ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        try:
            return self.http.get(f"{self.url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def workers(self) -> list[int]:
        """Living processes that run the worker for this data folder's server."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes()
                    environment = (entry / "environ").read_bytes()
                except OSError:
                    continue
                if b"tests.service.fake_worker" in command and str(self.data_dir).encode() in environment:
                    found.append(int(entry.name))
        return found

    def upload(self, text: str, name: str = "a.txt") -> str:
        answer = self.http.post(
            f"{self.url}/v1/files", files={"file": (name, text.encode())}, data={"purpose": "user_data"}, timeout=30
        )
        answer.raise_for_status()
        return str(answer.json()["id"])

    def file(self, file_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"{self.url}/v1/files/{file_id}").json()
        return found

    def document(self, file_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"{self.url}/v1/documents/{file_id}").json()
        return found

    def wait(self, file_id: str, status: str = "processed") -> dict[str, Any]:
        until(lambda: self.file(file_id)["status"] != "uploaded", 60)
        found = self.file(file_id)
        assert found["status"] == status, found
        return found

    def ask(self, file_id: str, question: str = "how long?") -> dict[str, Any]:
        content = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": question}]
        body = {
            "model": self.http.get(f"{self.url}/v1/models").json()["data"][0]["id"],
            "messages": [{"role": "user", "content": content}],
        }
        answer = self.http.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def metric(self, name: str) -> float:
        text = self.http.get(f"{self.url}/metrics").text
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def kill(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(30)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def serve(**settings: Any) -> Served:
        servers.append(Served(tmp_path, **settings))
        return servers[-1].start()

    yield serve
    for server in servers:
        assert server.process is not None
        server.http.close()
        if server.process.poll() is None:
            server.kill()
        until(lambda server=server: not server.workers())


def test_upload_answer_and_gentle_end(serving: Callable[..., Served]) -> None:
    server = serving()
    first = server.upload("some text, a private one\n" * 30)
    server.wait(first)
    answer = server.ask(first)
    assert answer["choices"][0]["message"]["content"].startswith("It is ")
    again = server.upload("some text, a private one\n" * 30)
    server.wait(again)
    assert server.metric("foreword_prefills_total") == 1
    assert server.metric("foreword_jobs") == 4  # two ingests, one prefill, one answer
    slow = server.upload("LONG " * 300)
    until(lambda: server.document(slow)["progress"] > 0.0 and server.document(slow)["state"] == "prefill")
    assert server.stop() == 0
    assert server.workers() == []
    log = server.log.read_text()
    assert "private" not in log
    assert "Traceback" not in log
    entries = server.lines()
    assert any(entry.get("job_id", "").startswith("ingest-") and "request_id" in entry for entry in entries)
    database = Database(database_path(server.data_dir))
    queue = SqliteQueue(database)
    assert queue.counts() == {"queued": 1, "succeeded": 5}  # the long one was released
    queue.close()
    database.close()


def test_worker_killed_in_the_middle(serving: Callable[..., Served]) -> None:
    server = serving()
    server.ask(server.upload("one"))
    assert server.metric("foreword_generated_tokens_total") == 3
    file_id = server.upload("PATIENT " * 200)
    until(lambda: server.document(file_id)["progress"] > 0.2 and server.document(file_id)["state"] == "prefill")
    (worker,) = server.workers()
    os.kill(worker, signal.SIGKILL)
    assert server.http.get(f"{server.url}/livez").status_code == 200
    server.wait(file_id)
    assert server.metric("foreword_prefills_total") == 2, "counts of the killed one are kept"
    assert server.metric("foreword_prefills_resumed_total") == 1
    assert server.metric("foreword_worker_restarts_total") == 1
    assert server.metric("foreword_lease_reclaims_total") == 1
    assert server.ask(file_id)["choices"][0]["message"]["content"].startswith("It is ")
    assert server.metric("foreword_generated_tokens_total") == 6


def test_everything_killed(serving: Callable[..., Served]) -> None:
    server = serving()
    done = server.upload("finished text")
    server.wait(done)
    prefills = server.metric("foreword_prefills_total")
    running = server.upload("PATIENT " * 200)
    until(lambda: server.document(running)["progress"] > 0.1 and server.document(running)["state"] == "prefill")
    queued = server.upload("hardly there")
    server.kill()
    assert prefills == 1
    server.start()
    assert {entry["id"] for entry in server.http.get(f"{server.url}/v1/files").json()["data"]} == {
        done,
        running,
        queued,
    }
    assert server.file(done)["status"] == "processed"
    server.wait(running)
    server.wait(queued)
    server.ask(done)
    assert server.metric("foreword_prefills_total") == 2


def test_poison_document_ends_dead_and_others_go_on(serving: Callable[..., Served]) -> None:
    server = serving(max_attempts=2)
    poison = server.upload("KILL")
    other = server.upload("SLOW " * 100)
    found = server.wait(poison, "error")
    assert "2 attempts" in found["status_details"]
    server.wait(other)
    assert server.metric("foreword_worker_restarts_total") == 2


def test_second_server_names_the_first(serving: Callable[..., Served]) -> None:
    server = serving()
    assert server.process is not None
    second = subprocess.run(
        [sys.executable, "-m", "tests.service.fake_serve"],
        env={**server.env, "FOREWORD_PORT": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode != 0
    assert f"data_dir_locked: {server.data_dir}/foreword.lock is held by process {server.process.pid}" in second.stderr
    taken = subprocess.run(
        [sys.executable, "-m", "tests.service.fake_serve"],
        env={**server.env, "FOREWORD_DATA_DIR": str(server.data_dir.parent / "other")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"address_in_use: can't listen on 127.0.0.1 port {server.port}" in taken.stderr
    assert server.ready()


def test_worker_ends_with_its_server(serving: Callable[..., Served]) -> None:
    server = serving()
    assert server.process is not None
    assert len(server.workers()) == 1
    os.kill(server.process.pid, signal.SIGKILL)  # the server alone, not its group
    server.process.wait(30)
    until(lambda: not server.workers())


def test_interrupt_from_the_keyboard_ends_both_gently(serving: Callable[..., Served]) -> None:
    server = serving()
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.process.wait(30) == 0
    assert server.workers() == []
    assert not any(entry["level"] in ("error", "critical") for entry in server.lines())


def test_worker_runs_alone(tmp_path: Path) -> None:
    server = Served(tmp_path)
    database = Database(database_path(server.data_dir))
    queue = SqliteQueue(database)
    sampling = {"max_tokens": 9}
    payload = {
        "documents": [],
        "question": [1],
        "fidelity": "default",
        "sampling": sampling,
        "received_at": time.time(),
        "waited": False,
    }
    job_id = queue.put(NewJob("answer", "t", payload)).id
    worker = subprocess.Popen([sys.executable, "-m", "tests.service.fake_worker"], env=server.env, cwd=ROOT)
    try:
        until(lambda: queue.get(job_id).state == "succeeded", 60)
        worker.terminate()
        assert worker.wait(30) == 0
    finally:
        server.http.close()
        worker.kill()
        worker.wait()
        queue.close()
        database.close()
