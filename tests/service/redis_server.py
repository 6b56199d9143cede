"""A real redis-server for tests, on a free port, empty and gone with its block."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            url = f"redis://127.0.0.1:{port}/0"
            with redis.Redis.from_url(url) as client:
                deadline = time.monotonic() + 30
                while True:
                    try:
                        client.ping()
                        break
                    except redis.ConnectionError:
                        assert server.poll() is None, "redis-server ended while starting"
                        assert time.monotonic() < deadline, "redis-server did not start within 30 s"
                        time.sleep(0.02)
            yield url
        finally:
            server.terminate()
