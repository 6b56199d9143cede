"""A real redis-server for tests, on a free port, empty and gone with its block."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtests.redis_server import RedisServer


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Its URL."""
    with RedisServer(folder) as server:
        yield server.url
