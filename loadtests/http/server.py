"""The server under load: a `foreword serve` of one's own with the default model."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

START_S = 180.0
STOP_S = 60.0


class LocalServer:
    """Started with its block, gone with it. `keys`: tenants by API key; `settings` are those of service.settings."""

    def __init__(
        self,
        folder: Path,
        *,
        keys: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "foreword", "serve"),
        start_s: float = START_S,
        **settings: object,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.data_dir = folder / "data"
        self.log = folder / "server.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        values = {"log_level": "warning", **settings, "data_dir": self.data_dir, "port": self.port}
        if keys:
            values["api_keys_file"] = folder / "keys.json"
            write_keys(folder / "keys.json", keys)
        self._environment = {f"FOREWORD_{name.upper()}": str(value) for name, value in values.items()}
        self._program, self._start_s = program, start_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "LocalServer":
        """Raises RuntimeError where it ends at once, TimeoutError where it isn't ready after `start_s`."""
        environment = {**os.environ, **self._environment}
        environment.pop("OMP_NUM_THREADS", None)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([sys.executable, *self._program], env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + self._start_s
        try:
            while not self._ready():
                if self._process.poll() is not None:
                    raise RuntimeError(f"the server ended with {self._process.returncode}: {self._last_words()}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not ready after {self._start_s:.0f} s: {self._last_words()}")
                time.sleep(0.1)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def api(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    @property
    def worker(self) -> psutil.Process | None:
        """None while it is being started again."""
        for child in self.api.children():
            try:
                if "service.worker" in child.cmdline():
                    return child
            except psutil.NoSuchProcess:
                continue
        return None

    def kill_worker(self) -> None:
        if (worker := self.worker) is not None:
            worker.send_signal(signal.SIGKILL)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def _stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the worker is told by the kernel
            self._process.wait()

    def _last_words(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]


def write_keys(path: Path, keys: Mapping[str, str]) -> None:
    """A keys file: `keys` gives each API key its tenant; the tenant `admin` may see the queue."""
    entries: list[dict[str, Any]] = [
        {"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, "admin": tenant == "admin"}
        for key, tenant in keys.items()
    ]
    path.write_text(json.dumps(entries), encoding="utf-8")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
