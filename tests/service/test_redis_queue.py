"""The queue and the records in a real redis-server: the contracts, and what is their own."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.cluster import until as found
from loadtests.proxy import Proxy
from loadtests.redis_server import RedisServer
from service.database import Database
from service.documents.redis import RedisDocuments
from service.queue.base import Effects, LeaseLost, NewJob, QueueUnavailable, RecordChange
from service.queue.redis_queue import RedisQueue
from service.queue.redis_store import RedisFull, RedisStore, source
from service.queue.sqlite_queue import SqliteQueue
from tests.contracts.backends import RedisBackend
from tests.contracts.documents_contract import DocumentsContract, ingest
from tests.contracts.queue_contract import QueueContract, new_document, new_file
from tests.service.bench import until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


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


# --- a command whose reply was lost ----------------------------------------------------------------------------------


@pytest.fixture
def proxy(server: RedisServer, backend: RedisBackend) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    backend.close()
    proxy.close()


@pytest.fixture
def behind(backend: RedisBackend, proxy: Proxy) -> RedisQueue:
    """A queue whose connections go through the proxy."""
    backend.stores.append(RedisStore(f"redis://127.0.0.1:{proxy.port}/0"))
    return RedisQueue(backend.stores[-1], site="site-a")


def digest(script: str) -> bytes:
    return source(script)[1].encode()


def test_what_is_sent_again_happens_once(
    server: RedisServer, behind: RedisQueue, proxy: Proxy, backend: RedisBackend
) -> None:
    queue = backend.queue()  # sees what is there without going through the proxy

    def losing_the_reply(script: str, action: Callable[[], Any]) -> Any:
        before = proxy.swallowed
        server.client.script_load(source(script)[0])  # so that it is sent by its digest
        proxy.swallow_reply(digest(script))
        result = action()
        assert proxy.swallowed == before + 1, f"{script} was not sent"
        return result

    put = losing_the_reply("put", lambda: behind.put(NewJob("ingest", "t", {}), new_file("file-1")))
    assert queue.counts() == {"queued": 1}
    job = losing_the_reply("claim", lambda: behind.claim("w", ["ingest"], lease_s=60))
    assert (job.id, job.attempts, job.epoch) == (put.id, 1, 1)
    losing_the_reply("emit", lambda: behind.emit(job, [("token", {"text": "once"})]))
    assert [event.type for event in queue.events(job.id)].count("token") == 1
    losing_the_reply("release", lambda: behind.release(job))
    assert (queue.get(job.id).attempts, queue.get(job.id).epoch) == (0, 2)
    job = behind.claim("w", ["ingest"], lease_s=60)
    losing_the_reply("fail", lambda: behind.fail(job, {"code": "x", "message": "x"}, retry=True))
    assert (queue.get(job.id).state, queue.get(job.id).attempts) == ("queued", 1)
    job = found(lambda: behind.claim("w", ["ingest"], lease_s=60), 10)  # it rests half a second
    effects = Effects(new_document().changes, [NewJob("prefill", "t", {})])
    losing_the_reply("finish", lambda: behind.finish(job, {"tokens": 7}, effects))
    assert queue.counts() == {"succeeded": 1, "queued": 1}
    assert [event.type for event in queue.events(job.id)].count("done") == 1
    with pytest.raises(LeaseLost):
        behind.finish(job, {"tokens": 7}, effects)  # another commit, that is, and not the same one again
    documents = RedisDocuments(behind._store, site="site-a")
    gone = losing_the_reply("delete_file", lambda: documents.delete_file("t", "file-1"))
    assert gone.id == "doc-1"


def test_a_broken_network_is_waited_for(behind: RedisQueue, proxy: Proxy, backend: RedisBackend) -> None:
    behind.put(NewJob("answer", "t", {}, job_id="job-1"))
    seen = behind.events("job-1")[-1].seq
    proxy.cut()
    threading.Timer(0.5, proxy.mend).start()
    behind.put(NewJob("answer", "t", {}, job_id="job-2"))
    assert backend.queue().get("job-2").state == "queued"
    # A reader that waits for news meanwhile gets them all, in order, without an error.
    job = backend.queue().claim("w", ["answer"], lease_s=60)
    assert job is not None
    texts: list[str] = []

    def read() -> None:
        after = seen
        while len(texts) < 6:
            for event in behind.events("job-1", after, timeout_s=1):
                after = event.seq
                texts.extend([event.data["text"]] if event.type == "token" else [])

    reader = threading.Thread(target=read)
    reader.start()
    writer = backend.queue()
    for number in range(6):
        if number == 2:
            proxy.cut()
        if number == 4:
            proxy.mend()
        writer.emit(job, [("token", {"text": str(number)})])
        time.sleep(0.1)
    reader.join(30)
    assert texts == ["0", "1", "2", "3", "4", "5"]
    behind.close()


def test_news_that_were_trimmed_wake_everybody(backend: RedisBackend, server: RedisServer) -> None:
    queue, other = backend.queue(), backend.queue()
    queue.put(NewJob("answer", "t", {}, job_id="job-1"))
    job = other.claim("w", ["answer"], lease_s=60)
    assert job is not None
    after = queue.events("job-1")[-1].seq
    name = queue._store.key("news_count")
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(queue.events("job-1", after, timeout_s=30)))
    reader.start()
    until(lambda: queue._news is not None and queue._news.waiters)
    time.sleep(0.2)
    server.client.incrby(name, 50)  # as if 50 entries had come and gone since this process looked
    server.client.xadd(queue._store.key("news"), {"j": "another"}, id=f"{server.client.incr(name).__int__()}-0")
    other.emit(job, [("token", {"text": "late"})])
    reader.join(30)
    assert [event.data for event in found] == [{"text": "late"}]
    queue.close()


# --- order, affinity, what an autoscaler sees ------------------------------------------------------------------------


def test_both_stores_serve_in_the_same_order(backend: RedisBackend, tmp_path: Path) -> None:
    draw, now = random.Random(5), 1_800_000_000.0
    database = Database(tmp_path / "foreword.sqlite")
    queues = [SqliteQueue(database, clock=lambda: now), backend.queue(lambda: now)]
    orders: list[list[str]] = [[], []]
    for number in range(120):
        now += draw.random() * 20
        if draw.random() < 0.7:
            tenant, cost = draw.choice("abcdé"), draw.choice([0, 500, 3000, 40_000])
            new = NewJob("answer", tenant, {}, priority=draw.randrange(-3, 4), cost_tokens=cost, job_id=f"job-{number}")
            for queue in queues:
                queue.put(new)
        else:
            for queue, order in zip(queues, orders, strict=True):
                job = queue.claim("w", ["answer"], lease_s=1e6, below=2000 if number % 3 == 0 else None)
                order.append("" if job is None else job.id)
    for queue, order in zip(queues, orders, strict=True):
        while (job := queue.claim("w", ["answer"], lease_s=1e6)) is not None:
            order.append(job.id)
        queue.close()
    assert orders[0] == orders[1]
    assert len(set(orders[0])) > 60
    database.close()


def test_who_holds_the_kv_is_asked_first_for_a_while(backend: RedisBackend) -> None:
    now = time.time()
    here, there = (RedisQueue(backend.store(lambda: now), site=site) for site in ("site-a", "site-b"))
    for site in ("site-a", "site-b"):
        here._store.run("beat", f"worker-{site}", site, "{}", "{}")
    here.put(NewJob("prefill", "t", {}, single_flight="doc-1:default", affinity="doc-1:default"))
    job = here.claim("w", ["prefill"], lease_s=60)
    assert job is not None
    here.finish(job, {})
    for name in ("one", "two", "three"):
        here.put(NewJob("answer", "t", {}, job_id=name, affinity="doc-1:default"))
        now += 0.01
    here.put(NewJob("answer", "t", {}, job_id="free"))
    assert there.claim("w", ["answer"], lease_s=60).id == "free"  # type: ignore[union-attr]
    assert there.claim("w", ["answer"], lease_s=60) is None
    start = time.monotonic()
    there.wait(0.2, ["answer"])
    assert time.monotonic() - start > 0.15, "what is kept for another is nothing to wake up for"
    assert here.claim("w", ["answer"], lease_s=60).id == "one"  # type: ignore[union-attr]
    now += 2.5
    assert there.claim("w", ["answer"], lease_s=60).id == "two"  # type: ignore[union-attr]
    here.put(NewJob("answer", "t", {}, job_id="four", affinity="doc-1:default"))
    now += 20  # the worker there is dead
    assert there.claim("w", ["answer"], lease_s=60).id == "three"  # type: ignore[union-attr]
    here.put(NewJob("answer", "t", {}, job_id="five", affinity="doc-1:default"))
    assert [there.claim("w", ["answer"], lease_s=60).id for _ in range(2)] == ["four", "five"]  # type: ignore[union-attr]


def test_a_stream_shows_what_waits_and_what_runs(backend: RedisBackend, server: RedisServer) -> None:
    queue = backend.queue()

    def pending_and_lag() -> tuple[int, int]:
        (group,) = server.client.xinfo_groups("{foreword}:queue:answer")
        return group["pending"], group["lag"]

    for number in range(5):
        queue.put(NewJob("answer", "t", {}, job_id=f"job-{number}"))
    assert pending_and_lag() == (0, 5)
    job, other = (queue.claim(f"w{number}", ["answer"], lease_s=60) for number in range(2))
    assert job is not None
    assert other is not None
    assert pending_and_lag() == (2, 3)
    consumers = server.client.xinfo_consumers("{foreword}:queue:answer", "workers")
    assert {one["name"]: one["pending"] for one in consumers} == {b"w0": 1, b"w1": 1}
    queue.cancel("job-4")
    assert pending_and_lag() == (2, 2)
    queue.finish(job, {})
    queue.release(other)
    assert pending_and_lag() == (0, 3)
    for _ in range(3):
        queue.finish(queue.claim("w", ["answer"], lease_s=60), {})  # type: ignore[arg-type]
    assert pending_and_lag() == (0, 0)
    assert server.client.xlen("{foreword}:queue:answer") == 0


# --- what stays, what goes -------------------------------------------------------------------------------------------

LASTING = {"counts", "fair", "fair_current", "garbage_count", "news", "news_count", "queue", "reply", "sites"}
LASTING |= {"worker_seen", "workers", "fleet", "uploaded_bytes", "uploaded_bytes_of"}


def test_nothing_is_left_of_what_is_gone(backend: RedisBackend, server: RedisServer) -> None:
    queue, documents = backend.queue(), backend.documents()
    queue.attend("api-1", for_s=60)
    for name in ("file-1", "file-2"):
        ingest(queue, documents, name)
    job = queue.claim("w", ["prefill"], lease_s=60)
    assert job is not None
    ready = Effects([RecordChange("prefills", "doc-1:default", {"state": "ready"})])
    queue.finish(job, {}, ready)
    payload = {"documents": ["doc-1"], "question": [1]}
    for name in ("answered", "failed", "cancelled"):
        queue.put(NewJob("answer", "t", payload, job_id=name, affinity="doc-1:default", reader="api-1"))
    for name in ("answered", "failed"):
        answer = queue.claim("w", ["answer"], lease_s=60)
        assert answer is not None
        queue.emit(answer, [("token", {"text": "word"})])
        queue.finish(answer, {}) if name == "answered" else queue.fail(
            answer, {"code": "x", "message": "x"}, retry=False
        )
    queue.cancel("cancelled")
    documents.share_holder("prefix-1:default", ["doc-1"])
    for name in ("file-1", "file-2"):
        documents.delete_file("t", name)
    documents.collect(lambda piece: None)
    queue.prune(time.time() + 1000)
    left = {key.decode().removeprefix("{foreword}:").partition(":")[0] for key in server.client.keys("*")}
    assert left <= LASTING | {"readers"}
    assert documents.uploaded_bytes() == documents.uploaded_bytes("t") == 0
    assert all(0 < server.client.pttl(key) <= 120_000 for key in server.client.keys("{foreword}:reply:*"))


def test_the_end_of_a_job_outlives_its_events(backend: RedisBackend, server: RedisServer) -> None:
    queue = backend.queue()
    queue.put(NewJob("answer", "t", {}, job_id="job-1"))
    queue.cancel("job-1")
    name = queue._store.key("events", "job-1")
    assert 0 < server.client.ttl(name) <= 86_400
    done = queue.events("job-1")[-1]
    server.client.delete(name)
    assert queue.events("job-1") == [done]
    assert queue.events("job-1", done.seq) == []


# --- a Redis in trouble ----------------------------------------------------------------------------------------------


def test_a_full_redis_takes_nothing_new_and_loses_nothing(backend: RedisBackend, server: RedisServer) -> None:
    queue, documents = backend.queue(), backend.documents()
    for name in ("running", "waiting"):
        queue.put(NewJob("answer", "t", {}, job_id=name))
    job = queue.claim("w", ["answer"], lease_s=60)
    assert job is not None
    server.client.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(RedisFull, match="full"):
            queue.put(NewJob("ingest", "t", {"text": "x" * 10_000}, job_id="too-much"), new_file("file-1"))
        assert documents.files("t", limit=9, after=None, order="asc", purpose=None) == []
        queue.extend(job, lease_s=60)
        queue.emit(job, [("token", {"text": "still here"})])
        queue.finish(job, {"text": "done"})
        waiting = queue.claim("w", ["answer"], lease_s=60)
        assert waiting is not None
        queue.release(waiting)
    finally:
        server.client.config_set("maxmemory", "0")
    assert queue.counts() == {"succeeded": 1, "queued": 1}
    assert queue.put(NewJob("ingest", "t", {}, job_id="too-much"), new_file("file-1")).state == "queued"


def test_a_killed_redis_comes_back_with_everything(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        store = RedisStore(server.url)
        queue, documents = RedisQueue(store, site="site-a"), RedisDocuments(store, site="site-a")
        ingest(queue, documents, "file-1")
        job = queue.claim("w", ["prefill"], lease_s=60)
        assert job is not None
        queue.emit(job, [("progress", {"progress": 0.5})])
        before = queue.events(job.id)
        server.kill()
        with pytest.raises(QueueUnavailable, match="can't be reached"):
            queue.get(job.id)
        threading.Timer(0.3, server.start).start()
        assert queue.events(job.id) == before
        assert queue.holds(job)
        queue.finish(job, {}, Effects([RecordChange("prefills", "doc-1:default", {"state": "ready"})]))
        assert documents.file("t", "file-1").status == "processed"
        queue.close()
        store.close()
