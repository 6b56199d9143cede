"""What queue and records share in Redis: one client, the scripts, and what its errors mean to us.

A script is a file in `lua/`, sent behind the library that all of them share. Every transition is one script, so it
happens whole or not at all. A command whose connection failed is sent again until `patience_s` is over; scripts whose
effect must not come twice are given a nonce, by which they know what they have done already.
"""

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis import exceptions

from service.queue.base import QueueUnavailable
from service.queue.redis_url import open_client, shown

log = logging.getLogger(__name__)

NAMESPACE = "{foreword}:"  # begins every key; a hash tag, so that they share one slot of a cluster
LIBRARY = ("common", "records", "jobs")
# Refused where Redis is full; all others must go on there, since they end work or make room.
REFUSED_WHEN_FULL = frozenset({"put", "change"})
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
BUSY_S = 60.0  # so long a record may wait for bytes of its name to be removed
BLOCK_S = 2.0  # no blocking read lasts longer, so that a dead connection is noticed
_AWAY = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "BUSY ", "NOREPLICAS", "UNBLOCKED")
_FULL = ("OOM", "MISCONF")
_REFUSED = ("WRONGPASS", "NOAUTH", "NOPERM")


class RedisFull(QueueUnavailable):
    """Redis takes no new work: its memory (or its disk) is used up. Nothing was written."""


class RedisRefused(QueueUnavailable):
    """Redis doesn't let this user in, or not do this."""

    code = "redis_refused"


class RedisStore:
    """Thread-safe; any number of processes."""

    def __init__(
        self,
        url: str,
        *,
        patience_s: float = 3.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Connects when it is first used. `clock` gives unix seconds in place of Redis' own. Raises InvalidRedisUrl."""
        self.url = shown(url)
        self._client: Any = open_client(url)
        self._patience_s = patience_s
        self._clock = clock
        self._closed = False
        self._away_since: float | None = None

    @property
    def away_s(self) -> float:
        """So long ago the first of the commands failed that all failed since."""
        since = self._away_since
        return 0.0 if since is None else time.monotonic() - since

    def key(self, *parts: str) -> str:
        return NAMESPACE + ":".join(parts)

    def now(self) -> float:
        """Unix seconds by the clock that leases go by. Raises QueueUnavailable."""
        if self._clock is not None:
            return self._clock()
        seconds, micros = self.ask(lambda client: client.time())
        return float(seconds + micros / 1e6)

    def run(self, script: str, *arguments: str | int | float) -> Any:
        """The reply of a script. Raises QueueUnavailable."""
        text, digest = source(script)
        time_given = "" if self._clock is None else repr(self._clock())
        words = [NAMESPACE, time_given, *arguments]

        def send(client: Any) -> Any:
            try:
                return client.evalsha(digest, 1, *words)
            except exceptions.NoScriptError:
                return client.eval(text, 1, *words)

        deadline = time.monotonic() + BUSY_S
        while True:
            reply = self.ask(send)
            if reply != [b"busy"]:
                return reply
            if time.monotonic() > deadline:
                raise QueueUnavailable("bytes of the same name are being removed, for too long")
            time.sleep(0.05)

    def run_once(self, script: str, *arguments: str | int | float) -> Any:
        """The same for a script that must not take effect twice, however often it is sent."""
        return self.run(script, secrets.token_hex(12), *arguments)

    def ask(self, command: Callable[[Any], Any], *, patient: bool = True) -> Any:
        """The reply to what `command` does with the client; done again while Redis is away. Raises QueueUnavailable."""
        deadline = time.monotonic() + (self._patience_s if patient else 0.0)
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                reply = command(self._client)
                self._away_since = None
                return reply
            except exceptions.RedisError as error:
                failure = meaning(error, self.url)
                self._away_since = self._away_since or time.monotonic()
                if isinstance(failure, RedisRefused | RedisFull) or time.monotonic() + pause_s > deadline:
                    raise failure from error
            if self._closed:
                raise QueueUnavailable("the connection to Redis is closed")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def command(self, name: str, *arguments: Any, **options: Any) -> Any:
        """One command of redis-py's, by its name there. Raises QueueUnavailable."""
        return self.ask(lambda client: getattr(client, name)(*arguments, **options))

    def read_behind(self, streams: Mapping[str, str], timeout_s: float, *, count: int = 1000) -> Any:
        """Entries of streams behind an id each, by stream; waits for the first, BLOCK_S at most. [] without any."""
        block_ms = max(1, int(1000 * min(timeout_s, BLOCK_S)))
        found = self.ask(lambda client: client.xread(dict(streams), count=count, block=block_ms), patient=False)
        # RESP3 answers with a map, RESP2 with pairs.
        return list(found.items()) if isinstance(found, dict) else (found or [])

    def close(self) -> None:
        self._closed = True
        self._client.close()


@cache
def source(script: str) -> tuple[str, str]:
    """(text, digest) of a script, with its library."""
    folder = files("service.queue") / "lua"
    head = "#!lua" if script in REFUSED_WHEN_FULL else "#!lua flags=allow-oom"
    parts = [head, *((folder / f"{name}.lua").read_text(encoding="utf-8") for name in (*LIBRARY, script))]
    text = "\n".join(parts)
    return text, sha1(text.encode(), usedforsecurity=False).hexdigest()


def meaning(error: exceptions.RedisError, url: str) -> QueueUnavailable:
    """What an error of redis-py is to a caller of queue and records. Programming errors are raised on."""
    text = str(error)
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError) or text.startswith(_REFUSED):
        return RedisRefused(f"Redis at {url} refuses: {text}")
    if isinstance(error, exceptions.NoPermissionError) or "executing the script can't" in text:
        return RedisRefused(f"Redis at {url} refuses: {text}: the user needs every command on {NAMESPACE}*")
    if isinstance(error, exceptions.OutOfMemoryError) or text.startswith(_FULL):
        return RedisFull(f"Redis at {url} is full: {text}")
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError) or text.startswith(_AWAY):
        return QueueUnavailable(f"Redis at {url} can't be reached: {text}")
    if isinstance(error, exceptions.ReadOnlyError | exceptions.ClusterError):
        return QueueUnavailable(f"Redis at {url} can't write: {text}")
    raise error


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def fields_of(flat: Sequence[bytes] | Mapping[bytes, bytes]) -> dict[str, str]:
    """A hash as scripts (a flat list) or commands (a map) give it."""
    if not isinstance(flat, Mapping):
        flat = dict(zip(flat[::2], flat[1::2], strict=True))
    return {name.decode(): value.decode() for name, value in flat.items()}
