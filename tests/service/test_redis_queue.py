"""The queue and the records in a real redis-server: the contracts, and what is their own."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from loadtests.redis_server import RedisServer
from service.documents.redis import RedisDocuments
from service.queue.redis_queue import RedisQueue
from service.queue.redis_store import RedisStore
from tests.contracts.documents_contract import DocumentsContract
from tests.contracts.queue_contract import QueueContract


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


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


@pytest.fixture
def backend(server: RedisServer) -> Iterator[RedisBackend]:
    server.client.flushall()
    backend = RedisBackend(server.url)
    yield backend
    backend.close()


class TestRedisQueue(QueueContract):
    """Everything in the contract."""


class TestRedisDocuments(DocumentsContract):
    """Everything in the contract."""
