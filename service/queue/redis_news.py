"""One thread a process that reads the stream of news in Redis and wakes whoever waits for a job's events."""

import logging
import threading

from service.queue.base import QueueUnavailable
from service.queue.redis_store import RedisStore
from service.queue.waiters import Waiters

log = logging.getLogger(__name__)

AGAIN_S = 0.5


class RedisNews:
    """News that were trimmed before they were read, or came while Redis was away, wake everybody: who is woken looks
    for himself, so a loss costs a look and never an event."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._wanted = threading.Event()  # somebody waits
        self.waiters = Waiters(self._wanted.set)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="redis-news", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        last: int | None = None
        while not self._closed:
            if not self.waiters:
                last = None
                self._wanted.wait()
                self._wanted.clear()
                continue
            try:
                last = self._newest() if last is None else self._read(last)
            except QueueUnavailable as error:
                log.warning("no news of jobs: %s", error)
                last = None
                self._wanted.wait(AGAIN_S)
                self._wanted.clear()

    def _newest(self) -> int:
        newest = int(self._store.command("get", self._store.key("news_count")) or 0)
        self.waiters.wake_all()
        return newest

    def _read(self, last: int) -> int:
        stream = self._store.key("news")
        for _, entries in self._store.read_behind({stream: f"{last}-0"}, 1.0):
            for entry, fields in entries:
                number = int(entry.partition(b"-")[0])
                if number != last + 1:
                    self.waiters.wake_all()
                last = number
                self.waiters.wake(fields[b"j"].decode())
        return last
