"""API and worker processes of one Redis and one shared folder, each started as a user would, each of them killable."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from loadtests.redis_server import free_port

ROOT = Path(__file__).resolve().parent.parent


class Member:
    """One process. `kill` and `start` again keep its name, data folder and port."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], log: Path, port: int) -> None:
        self.name, self.log, self.port = name, log, port
        self.url = f"http://127.0.0.1:{port}"
        self._command, self._environment = list(command), environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Member":
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            if number in (signal.SIGKILL, signal.SIGTERM):
                self.process.wait(30)

    def wait(self, timeout_s: float = 60) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def answers(self, path: str) -> int:
        """The status code; 0 where nobody answers."""
        try:
            return httpx.get(self.url + path, timeout=10).status_code
        except httpx.TransportError:
            return 0


class Cluster:
    """Processes are ended with its block."""

    def __init__(
        self,
        folder: Path,
        redis_url: str,
        *,
        api: Sequence[str] = ("-m", "foreword", "serve"),
        worker: Sequence[str] = ("-m", "foreword", "worker"),
        **settings: object,
    ) -> None:
        """`api` and `worker` are arguments of Python, `settings` those of service.settings."""
        self.folder = folder
        self._commands = {"api": api, "worker": worker}
        self._settings = {"redis_url": redis_url, "shared_dir": folder / "shared", "disk_floor_bytes": 0, **settings}
        self.members: list[Member] = []

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self.members:
            member.kill(signal.SIGCONT)
            member.kill()

    def api(self, name: str, **settings: object) -> Member:
        return self._start("api", name, settings)

    def worker(self, name: str, **settings: object) -> Member:
        return self._start("worker", name, settings)

    def _start(self, kind: str, name: str, settings: dict[str, object]) -> Member:
        port = free_port()
        values = {"data_dir": self.folder / name, "port": port, **self._settings, **settings}
        environment = {**os.environ, **{f"FOREWORD_{key.upper()}": str(value) for key, value in values.items()}}
        command = [sys.executable, *self._commands[kind]]
        member = Member(name, command, environment, self.folder / f"{name}.log", port)
        self.members.append(member)
        return member.start()


class Client:
    """What a user does, at any of the APIs."""

    def __init__(self, *, timeout_s: float = 60) -> None:
        self.http = httpx.Client(timeout=timeout_s)

    def upload(self, api: Member, text: str, name: str = "a.txt", key: str | None = None) -> str:
        """The file's id. Raises httpx.HTTPError."""
        answer = self.http.post(
            f"{api.url}/v1/files",
            files={"file": (name, text.encode())},
            data={"purpose": "user_data"},
            headers={} if key is None else {"idempotency-key": key},
        )
        answer.raise_for_status()
        return str(answer.json()["id"])

    def get(self, api: Member, path: str) -> dict[str, Any]:
        answer = self.http.get(api.url + path)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def document(self, api: Member, file_id: str) -> dict[str, Any]:
        return self.get(api, f"/v1/documents/{file_id}")

    def processed(self, api: Member, file_id: str, timeout_s: float = 60) -> dict[str, Any]:
        """The document, once it is ready or failed. Raises TimeoutError."""

        def ended() -> dict[str, Any] | None:
            try:
                found = self.document(api, file_id)
            except httpx.HTTPError:  # Redis is away, say
                return None
            return found if found["status"] != "uploaded" else None

        return until(ended, timeout_s, f"{file_id} is not processed")

    def body(self, api: Member, file_id: str, question: str, **options: object) -> dict[str, Any]:
        content = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": question}]
        model = self.get(api, "/v1/models")["data"][0]["id"]
        return {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, **options}

    def ask(self, api: Member, file_id: str, question: str, **options: object) -> dict[str, Any]:
        """The completion. Raises httpx.HTTPError."""
        body = self.body(api, file_id, question, **options)
        answer = self.http.post(f"{api.url}/v1/chat/completions", json=body)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def close(self) -> None:
        self.http.close()


def until(condition: Callable[[], Any], timeout_s: float, what: str = "it did not happen") -> Any:
    """The first true value of `condition`. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {timeout_s} s")
        time.sleep(0.02)
    return found
