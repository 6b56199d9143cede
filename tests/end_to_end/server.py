"""A real `foreword serve` in its own process group, and what the end-to-end tests ask of it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from openai import OpenAI


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    def __init__(self, data_dir: Path, **settings: object) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.settings = {f"FOREWORD_{name.upper()}": str(value) for name, value in settings.items()}
        self.log = data_dir.parent / f"{data_dir.name}-{self.port}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float = 120) -> "Server":
        environment = {**os.environ, **self.settings, "FOREWORD_DATA_DIR": str(self.data_dir)}
        environment.pop("OMP_NUM_THREADS", None)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "foreword", "serve", "--port", str(self.port)],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"serve ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
            try:
                if httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise TimeoutError(f"not ready after {timeout_s} s:\n{self.log.read_text()[-4000:]}")

    def client(self, api_key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, timeout=300, max_retries=0)

    def worker_pid(self) -> int:
        """The worker: the one child of the server that has torch loaded."""
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children():
            if "worker" in " ".join(child.cmdline()):
                return child.pid
        raise RuntimeError("no worker process")

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples called `name` that carry `labels`; 0 where there is none."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            if match := re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line):
                found = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
                if labels.items() <= found.items():
                    total += float(match[2])
        return total

    def document(self, file_id: str) -> dict:
        answer = httpx.get(f"{self.url}/v1/documents/{file_id}", timeout=10)
        answer.raise_for_status()
        return answer.json()

    def wait_for(self, file_id: str, *, progress: float | None = None, timeout_s: float = 240) -> dict:
        """Until the document is processed (or failed), or its prefill has come as far as `progress`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            document = self.document(file_id)
            if progress is not None and document["state"] == "prefill" and document["progress"] >= progress:
                return document
            if document["state"] in ("ready", "error"):
                return document
            time.sleep(0.05)
        raise TimeoutError(f"still {document['state']} at {document['progress']} after {timeout_s} s")

    def kill(self, pid: int | None = None) -> None:
        """kill -9 of one process, or of everything."""
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            return
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def running(data_dir: Path, **settings: object) -> Iterator[Server]:
    server = Server(data_dir, **settings)
    try:
        yield server.start()
    finally:
        server.stop()
