"""A redis-server of one's own: on a free port, in its own folder, set up as docs/distributed.md says."""

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

START_S = 30.0
DURABLE = ("--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction")


class RedisServer:
    """Started with its block, gone with it. `kill` and `start` again keep port and folder."""

    def __init__(self, folder: Path, *options: str, port: int | None = None, **client: Any) -> None:
        """`options` are redis-server's, behind those of DURABLE; `client` those of the client that waits for it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._options = options
        self.client: Any = redis.Redis(**{"host": "127.0.0.1", "port": self.port, **client})
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "RedisServer":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.kill()

    @property
    def command(self) -> Sequence[str]:
        place = ("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder), "--save", "")
        return ["redis-server", *place, *DURABLE, *self._options]

    def start(self) -> "RedisServer":
        log = (self.folder / "redis.log").open("ab")
        with log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.client.ping()
                return self
            except redis.ConnectionError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    log_text = (self.folder / "redis.log").read_text(errors="replace")
                    raise RuntimeError(f"redis-server did not start:\n{log_text[-2000:]}") from None
                time.sleep(0.02)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(START_S)
            self.process = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
