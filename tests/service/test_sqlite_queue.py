"""The embedded queue: the contract, and what is its own."""

import dataclasses
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.database import SCHEMA_VERSION, Database, DatabaseUnavailable, SchemaTooNew
from service.documents.sqlite import SqliteDocuments
from service.queue.base import NewJob
from service.queue.machine_clock import uptime_s
from service.queue.sqlite_queue import SqliteQueue
from service.queue.wakeup import Announcer, Listener, socket_folder
from service.timer import Timer
from tests.contracts.documents_contract import DocumentsContract
from tests.contracts.queue_contract import QueueContract


@dataclasses.dataclass
class SqliteBackend:
    path: Path
    database: Database | None = None

    def queue(self, clock: Callable[[], float] | None = None) -> SqliteQueue:
        return SqliteQueue(self._open(), clock=clock or time.time, uptime=clock or uptime_s)

    def documents(self) -> SqliteDocuments:
        return SqliteDocuments(self._open())

    def _open(self) -> Database:
        self.database = self.database or Database(self.path)
        return self.database

    def close(self) -> None:
        if self.database is not None:
            self.database.close()

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "database": None}


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
        for table in ("job_documents", "objects", "buckets", "slots"):
            connection.execute(f"DROP TABLE {table}")
        for statement in (
            "DROP TABLE job_readers",
            "DROP TABLE readers",
            "DROP INDEX jobs_line",
            "DROP INDEX jobs_finished",
            "ALTER TABLE jobs DROP COLUMN lease_boot",
            "CREATE INDEX jobs_queued ON jobs (kind, tenant, priority, created_at) WHERE state = 'queued'",
            "PRAGMA user_version = 1",
        ):
            connection.execute(statement)
    connection.close()
    database = Database(path)
    with database.read() as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
        assert "segments" in [row["name"] for row in connection.execute("PRAGMA table_info(prefills)")]
        assert connection.execute("SELECT * FROM objects").fetchall() == []
        indexes = {row["name"] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
        assert {"jobs_line", "jobs_finished"} <= indexes
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
