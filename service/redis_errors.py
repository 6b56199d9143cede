"""What an error of Redis means to those who call: not now. Nothing was written, or nobody knows whether it was."""

from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import OutOfMemoryError, RedisError

from service.queue.base import QueueUnavailable


@contextmanager
def unavailable() -> Iterator[None]:
    """Turns an error of Redis (away, full, wrong password) into QueueUnavailable, which HTTP answers with 503."""
    try:
        yield
    except OutOfMemoryError as error:
        raise QueueUnavailable(f"Redis is full: {error}") from error
    except RedisError as error:
        raise QueueUnavailable(f"Redis: {error}") from error
