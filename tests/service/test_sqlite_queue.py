"""The embedded queue: the contract, and what is its own."""

import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.database import SCHEMA_VERSION, Database, DatabaseUnavailable, SchemaTooNew
from service.queue.base import NewJob
from service.queue.sqlite_queue import SqliteQueue
from service.queue.wakeup import Announcer, Listener, socket_folder
from service.timer import Timer
from tests.contracts.backends import SqliteBackend
from tests.contracts.documents_contract import DocumentsContract
from tests.contracts.queue_contract import QueueContract
from tests.service.bench import until


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[SqliteBackend]:
    backend = SqliteBackend(tmp_path / "data" / "foreword.sqlite")
    yield backend
    backend.close()


class TestSqliteQueue(QueueContract):
    """Everything in the contract."""


class TestSqliteDocuments(DocumentsContract):
    """Everything in the contract."""


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreword.sqlite"
    Database(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(SchemaTooNew, match=f"version {SCHEMA_VERSION + 1}, this program knows up to {SCHEMA_VERSION}"):
        Database(path)


def test_a_file_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "foreword.sqlite"
    Database(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE prefills DROP COLUMN segments")
        connection.execute("ALTER TABLE prefills DROP COLUMN head_map")
        for table in ("job_documents", "objects", "buckets", "slots"):
            connection.execute(f"DROP TABLE {table}")
        for statement in (
            "DROP TABLE job_readers",
            "DROP TABLE readers",
            "DROP INDEX jobs_line",
            "DROP INDEX jobs_finished",
            "DROP INDEX jobs_cost",
            "ALTER TABLE jobs DROP COLUMN lease_boot",
            "CREATE INDEX jobs_queued ON jobs (kind, tenant, priority, created_at) WHERE state = 'queued'",
            "PRAGMA user_version = 1",
        ):
            connection.execute(statement)
    connection.close()
    database = Database(path)
    with database.read() as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
        columns = {row["name"] for row in connection.execute("PRAGMA table_info(prefills)")}
        assert {"segments", "head_map"} <= columns
        assert connection.execute("SELECT * FROM objects").fetchall() == []
        indexes = {row["name"] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
        assert {"jobs_line", "jobs_finished", "jobs_cost"} <= indexes
        assert "jobs_queued" not in indexes
    database.close()
    Database(path).close()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "foreword.sqlite"
    path.write_bytes(b"not a database, but long enough to look like one" * 20)
    with pytest.raises(DatabaseUnavailable, match=r"foreword\.sqlite"):
        Database(path)


def test_full_database_loses_nothing(backend: SqliteBackend) -> None:
    queue = backend.queue()
    queue.put(NewJob("answer", "t", {}, job_id="before"))
    assert backend.database is not None
    with backend.database.read() as connection:  # the one pooled connection: the next write gets it again
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DatabaseUnavailable, match="full"):
        queue.put(NewJob("answer", "t", {"text": "x" * 100_000}, job_id="too-big"))
    assert queue.get("before").state == "queued"
    assert queue.counts() == {"queued": 1}
    queue.close()


def test_put_syncs_and_emit_does_not(backend: SqliteBackend) -> None:
    queue = backend.queue()
    assert backend.database is not None
    seen = []
    with backend.database.read() as connection:
        connection.set_trace_callback(lambda sql: seen.append(sql) if "synchronous" in sql else None)
    queue.put(NewJob("answer", "t", {}))
    job = queue.claim("w", ["answer"], lease_s=10)
    assert job is not None
    queue.emit(job, [("token", {"text": "a"})])
    queue.finish(job, {})
    assert [sql.split()[-1] for sql in seen] == ["FULL", "NORMAL", "NORMAL", "FULL"]
    queue.close()


def test_sockets_of_a_deep_folder_are_short(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80) / ("e" * 80)
    folder = socket_folder(deep)
    assert len(os.fsencode(folder)) < 60
    assert folder == socket_folder(deep)
    listener = Listener(folder, "events", list)
    listener.close()
    assert list(folder.iterdir()) == []


def test_socket_of_a_killed_process_is_swept(tmp_path: Path) -> None:
    folder = socket_folder(tmp_path)
    stale = folder / "events.1-dead"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(stale))
    announcer = Announcer(folder)
    announcer.announce("jobs", "job-1")
    assert stale.exists()
    announcer.announce("events", "job-1")
    announcer.close()
    assert not stale.exists()


def test_lost_wakeup_costs_a_tick_not_an_event(backend: SqliteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, other = backend.queue(), backend.queue()
    job_id = queue.put(NewJob("answer", "t", {})).id
    job = other.claim("w", ["answer"], lease_s=10)
    assert job is not None
    monkeypatch.setattr(other._announcer, "announce", lambda topic, key: None)
    loud = Announcer(socket_folder(backend.path.parent))
    timer = threading.Timer(0.1, lambda: other.emit(job, [("token", {"text": "quiet"})]))
    timer.start()
    noise = Timer("noise", 0.02, lambda: loud.announce("events", "another job"))
    start = time.monotonic()
    (event,) = queue.events(job_id, queue.events(job_id)[-1].seq, timeout_s=60)
    assert event.data == {"text": "quiet"}
    assert time.monotonic() - start < 30
    timer.join()
    noise.close()
    loud.close()
    queue.close()
    other.close()


def test_leases_survive_a_clock_that_is_set(backend: SqliteBackend) -> None:
    now = time.time()
    queue = SqliteQueue(backend.open(), clock=lambda: now)
    queue.put(NewJob("answer", "t", {}, job_id="held"))
    queue.put(NewJob("answer", "t", {}, job_id="resting"))
    held, resting = (queue.claim("w", ["answer"], lease_s=60) for _ in range(2))
    assert held is not None
    assert resting is not None
    queue.fail(resting, {"code": "x", "message": "x"}, retry=True)
    now += 86_400
    assert queue.reclaim() == 0
    now -= 2 * 86_400
    assert queue.reclaim() == 0
    assert queue.holds(held)
    until(lambda: queue.claim("w", ["answer"], lease_s=60), 10)  # it rests half a second, whatever the clock says
    queue.close()


def test_leases_end_with_the_boot(backend: SqliteBackend) -> None:
    uptime = 1e6
    queue = SqliteQueue(backend.open(), uptime=lambda: uptime)
    queue.attend("api-1", for_s=60)
    queue.put(NewJob("answer", "t", {}, job_id="held"))
    queue.put(NewJob("answer", "t", {}, job_id="resting"))
    queue.put(NewJob("answer", "t", {}, job_id="read", reader="api-1"))
    for _ in range(2):
        job = queue.claim("w", ["answer"], lease_s=60)
    assert job is not None
    queue.fail(job, {"code": "x", "message": "x"}, retry=True)
    with backend.open().write(durable=True) as connection:
        connection.execute("UPDATE jobs SET lease_boot = 'another' WHERE state = 'running'")
        connection.execute("UPDATE readers SET boot = 'another'")
    uptime = 5.0
    assert queue.reclaim() == 1
    assert queue.get("read").state == "cancelled"
    claimed = {job.id for _ in range(2) if (job := queue.claim("w", ["answer"], lease_s=60)) is not None}
    assert claimed == {"held", "resting"}
    queue.close()


@pytest.mark.parametrize(
    ("query", "index"),
    [
        ("DELETE FROM jobs WHERE finished_at < 5", "jobs_finished"),
        ("SELECT id FROM jobs WHERE state = 'queued' AND kind = 'answer' AND tenant > '' "
         "ORDER BY tenant, created_at - 30.0 * priority LIMIT 1", "jobs_line"),
    ],
)  # fmt: skip
def test_no_scan_of_all_jobs(backend: SqliteBackend, query: str, index: str) -> None:
    with backend.open().read() as connection:
        plan = [row["detail"] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
    assert any(index in step for step in plan), plan
    assert not any(step.startswith("SCAN jobs") or "TEMP B-TREE" in step for step in plan), plan
