"""What a list of documents asks of the stores: as much for many as for one."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtests.redis_server import RedisServer
from service.database import Database
from service.documents.base import Documents
from service.documents.redis import RedisDocuments
from service.documents.sqlite import SqliteDocuments
from service.queue.base import Effects, NewJob, Queue, RecordChange
from service.queue.redis_queue import RedisQueue
from service.queue.redis_store import RedisStore
from service.queue.sqlite_queue import SqliteQueue
from service.views import document_view, document_views
from tests.service.http_fakes import FakeKV

MANY = 1000


class Stores:
    """A queue and documents, and how often they were asked since the last look."""

    def __init__(self, queue: Queue, documents: Documents, close: Callable[[], None]) -> None:
        self.queue, self.documents, self.close = queue, documents, close
        self.asked: list[str] = []

    def questions(self) -> list[str]:
        asked, self.asked[:] = list(self.asked), []
        return asked


def sqlite_stores(folder: Path) -> Stores:
    database = Database(folder / "foreword.sqlite")
    stores = Stores(SqliteQueue(database), SqliteDocuments(database), database.close)
    with database.read() as connection:  # the only one in the pool: every read in turn uses it
        connection.set_trace_callback(stores.asked.append)
    return stores


def redis_stores(folder: Path) -> Stores:
    server = RedisServer(folder / "redis").start()
    store = RedisStore(server.url)

    def close() -> None:
        store.close()
        server.client.close()
        server.kill()

    stores = Stores(RedisQueue(store), RedisDocuments(store), close)
    ask = store.ask

    def counted(command: Callable[[Any], Any], **options: bool) -> Any:
        stores.asked.append("round trip")
        return ask(command, **options)

    store.ask = counted  # type: ignore[method-assign]
    return stores


@pytest.fixture(params=[sqlite_stores, redis_stores])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    stores = request.param(tmp_path)
    yield stores
    stores.queue.close()
    stores.close()


def fill(stores: Stores) -> FakeKV:
    """Files of every kind: ready, being prefilled, being ingested, and one whose document is gone."""
    kv, now = FakeKV(), time.time()
    for number in range(MANY):
        file = {"tenant": "t", "filename": "a.txt", "purpose": "user_data", "size_bytes": 5, "created_at": now + number}
        changes, put = list[RecordChange](), list[NewJob]()
        if number % 3 != 2:
            document_id = f"doc-{number}"
            document = {"tenant": "t", "content_hash": "c", "stream_hash": "s", "tokenizer_digest": "d"}
            document |= {"num_tokens": number, "folder": f"documents/{number}", "created_at": now}
            prefill = {"document_id": document_id, "tenant": "t", "fidelity": ("default", "strict")[number % 2]}
            prefill |= {"state": "ready", "digest": "old"} if number % 3 == 0 else {}
            changes += [
                RecordChange("documents", document_id, document),
                RecordChange("prefills", f"{document_id}:{prefill['fidelity']}", prefill),
            ]
            file |= {"document_id": document_id, "fidelity": prefill["fidelity"]}
            if number % 3 == 1:
                put = [NewJob("prefill", "t", {}, single_flight=f"{document_id}:{prefill['fidelity']}")]
            else:
                file["status"] = "processed"
                kv.stored[f"{document_id}:{prefill['fidelity']}"] = 100 + number
        changes.append(RecordChange("files", f"file-{number}", {**file, "ingest_job": f"ingest-{number}"}))
        stores.queue.put(NewJob("ingest", "t", {}, job_id=f"ingest-{number}"), Effects(changes, put))
    return kv


def test_a_page_of_a_thousand_asks_no_more_than_one_document(stores: Stores) -> None:
    kv = fill(stores)
    services: Any = SimpleNamespace(
        documents=stores.documents,
        queue=stores.queue,
        kv_store=kv,
        engine_digest=lambda fidelity: "new",
        model=SimpleNamespace(trained_tokens=None),
    )
    stores.questions()
    files = stores.documents.files("t", limit=MANY, after=None, order="asc", purpose=None)
    listed = len(stores.questions())
    views = document_views(services, files)
    asked = stores.questions()
    assert len(views) == MANY
    assert 0 < len(asked) <= 3, asked
    assert listed <= 2
    document_views(services, files[1:2])
    assert len(stores.questions()) == len(asked)
    assert [view["state"] for view in views[:3]] == ["ready", "prefill", "ingest"]
    assert (views[0]["kv"], views[0]["kv_bytes"]["disk"], views[0]["num_tokens"]) == ("stale", 100, 0)
    assert (views[1]["job"]["state"], views[1]["num_tokens"]) == ("queued", 1)
    assert (views[2]["job"]["id"], views[2]["kv"]) == ("ingest-2", "none")
    assert [document_view(services, file) for file in files[:30]] == views[:30], "each by itself looks the same"
    assert document_views(services, []) == []


def test_a_document_that_was_deleted_meanwhile_spoils_no_list(stores: Stores) -> None:
    services: Any = SimpleNamespace(
        documents=stores.documents,
        queue=stores.queue,
        kv_store=fill(stores),
        engine_digest=lambda fidelity: None,
        model=SimpleNamespace(trained_tokens=None),
    )
    files = stores.documents.files("t", limit=6, after=None, order="asc", purpose=None)
    stores.documents.delete_file("t", "file-0")
    views = document_views(services, files)
    assert (views[0]["id"], views[0]["num_tokens"], views[0]["kv"]) == ("file-0", None, "none")
    assert views[3]["num_tokens"] == 3
