"""The stores that the contracts run on. Pickled into other processes, which open them anew."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from service.database import Database
from service.documents.redis import RedisDocuments
from service.documents.sqlite import SqliteDocuments
from service.queue.machine_clock import uptime_s
from service.queue.redis_queue import RedisQueue
from service.queue.redis_store import RedisStore
from service.queue.sqlite_queue import SqliteQueue


@dataclasses.dataclass
class SqliteBackend:
    path: Path
    database: Database | None = None

    def queue(self, clock: Callable[[], float] | None = None) -> SqliteQueue:
        return SqliteQueue(self.open(), clock=clock or time.time, uptime=clock or uptime_s)

    def documents(self) -> SqliteDocuments:
        return SqliteDocuments(self.open())

    def open(self) -> Database:
        self.database = self.database or Database(self.path)
        return self.database

    def close(self) -> None:
        if self.database is not None:
            self.database.close()

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "database": None}


@dataclasses.dataclass
class RedisBackend:
    url: str
    stores: list[RedisStore] = dataclasses.field(default_factory=list)

    def store(self, clock: Callable[[], float] | None = None) -> RedisStore:
        self.stores.append(RedisStore(self.url, clock=clock))
        return self.stores[-1]

    def queue(self, clock: Callable[[], float] | None = None) -> RedisQueue:
        return RedisQueue(self.store(clock), site="site-a")

    def documents(self) -> RedisDocuments:
        store = self.store()
        store.run("beat", "worker-a", "site-a", "{}", "{}")
        return RedisDocuments(store, site="site-a")

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def __getstate__(self) -> dict[str, object]:
        return {"url": self.url, "stores": []}
