"""The embedded store: one SQLite file in WAL mode, shared by threads and by processes.

Jobs and records live in the same file, so that what a job changes is committed together with its end.
"""

import sqlite3
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from service.locks import exclusive
from service.queue.base import QueueUnavailable

SCHEMA_VERSION = 6
BUSY_TIMEOUT_S = 30.0

_SCHEMA = """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    payload TEXT NOT NULL,
    priority INTEGER NOT NULL,
    cost_tokens INTEGER NOT NULL,
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    max_attempts INTEGER NOT NULL,
    epoch INTEGER NOT NULL DEFAULT 0,
    single_flight TEXT,
    worker TEXT,
    lease_until REAL,  -- seconds since the boot `lease_boot`
    lease_boot TEXT,
    not_before REAL NOT NULL DEFAULT 0,
    progress REAL NOT NULL DEFAULT 0,
    detail TEXT NOT NULL DEFAULT '{}',
    result TEXT,
    error TEXT,
    created_at REAL NOT NULL,
    started_at REAL,
    finished_at REAL,
    cancel_requested INTEGER NOT NULL DEFAULT 0,
    last_seq INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX jobs_single_flight ON jobs (single_flight) WHERE state IN ('queued', 'running');
CREATE INDEX jobs_running ON jobs (lease_until) WHERE state = 'running';
CREATE INDEX jobs_state ON jobs (state, finished_at);

CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    seq INTEGER NOT NULL,
    type TEXT NOT NULL,
    data TEXT NOT NULL,
    UNIQUE (job_id, seq)
);

-- The state of deficit round-robin; a lane is a set of kinds that are claimed together.
CREATE TABLE fairness (
    lane TEXT NOT NULL,
    tenant TEXT NOT NULL,
    deficit INTEGER NOT NULL,
    current INTEGER NOT NULL,
    PRIMARY KEY (lane, tenant)
) WITHOUT ROWID;

CREATE TABLE documents (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    content_hash TEXT NOT NULL,
    stream_hash TEXT NOT NULL,
    tokenizer_digest TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,
    folder TEXT NOT NULL,
    created_at REAL NOT NULL,
    stage_seconds TEXT NOT NULL DEFAULT '{}'
);

CREATE TABLE files (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    kind TEXT NOT NULL DEFAULT 'auto',
    fidelity TEXT NOT NULL DEFAULT 'default',
    priority INTEGER NOT NULL DEFAULT 0,
    base TEXT,
    pinned INTEGER NOT NULL DEFAULT 0,
    kv_ttl_s REAL,
    sources TEXT NOT NULL DEFAULT '[]',
    status TEXT NOT NULL DEFAULT 'uploaded',
    status_details TEXT,
    error TEXT,
    ingest_job TEXT,
    document_id TEXT REFERENCES documents (id) DEFERRABLE INITIALLY DEFERRED
);
CREATE INDEX files_tenant ON files (tenant, created_at, id);
CREATE INDEX files_document ON files (document_id);
CREATE INDEX files_ingest ON files (ingest_job);
CREATE INDEX files_expiry ON files (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE prefills (
    id TEXT PRIMARY KEY,
    document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED,
    tenant TEXT NOT NULL,
    fidelity TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'queued',
    job_id TEXT,
    num_tokens INTEGER,
    digest TEXT,
    density REAL,
    recall TEXT,
    heads TEXT,
    cached_tokens INTEGER,
    layers_recomputed INTEGER,
    cold_ttft_s REAL,
    seconds REAL,
    error TEXT,
    segments TEXT,
    head_map TEXT
);
CREATE INDEX prefills_document ON prefills (document_id);
CREATE INDEX prefills_job ON prefills (job_id);

-- KV of several documents in one prefix: it goes when any of them goes.
CREATE TABLE shared_holders (
    holder TEXT NOT NULL,
    document_id TEXT NOT NULL,
    PRIMARY KEY (holder, document_id)
) WITHOUT ROWID;
CREATE INDEX shared_holders_document ON shared_holders (document_id);

-- Bytes whose record is gone: removed by the worker's housekeeping, also after a crash in between.
CREATE TABLE garbage (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,  -- upload | folder | holder
    name TEXT NOT NULL
);
"""

# Made in version 3, by migration too.
_SERVICE_TABLES = """
-- Which documents an answer is about: what it said goes with them.
CREATE TABLE job_documents (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    document_id TEXT NOT NULL,
    PRIMARY KEY (document_id, job_id)
) WITHOUT ROWID;
CREATE INDEX job_documents_job ON job_documents (job_id);

CREATE TABLE objects (
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    data TEXT NOT NULL,
    version INTEGER NOT NULL DEFAULT 1,
    created_at REAL NOT NULL,
    due_at REAL,
    PRIMARY KEY (kind, tenant, id)
) WITHOUT ROWID;
CREATE INDEX objects_created ON objects (kind, tenant, created_at, id);
CREATE INDEX objects_due ON objects (kind, due_at) WHERE due_at IS NOT NULL;

-- Token buckets: what was left of one, and when.
CREATE TABLE buckets (
    name TEXT PRIMARY KEY,
    level REAL NOT NULL,
    at REAL NOT NULL
) WITHOUT ROWID;

-- What runs at once under a limit; a slot that nobody renews is free again.
CREATE TABLE slots (
    name TEXT NOT NULL,
    slot TEXT NOT NULL,
    until REAL NOT NULL,
    PRIMARY KEY (name, slot)
) WITHOUT ROWID;
"""

# Made in version 4, by migration too.
_LINES = """
-- In the order that one tenant's jobs go: a wait of service.queue.base.AGEING_S is worth one step of priority.
CREATE INDEX jobs_line ON jobs (kind, tenant, created_at - 30.0 * priority) WHERE state = 'queued';
CREATE INDEX jobs_finished ON jobs (finished_at) WHERE finished_at IS NOT NULL;

-- API processes, until when they are believed to live (as leases), and the jobs that are made for them alone.
CREATE TABLE readers (
    name TEXT PRIMARY KEY,
    until REAL NOT NULL,
    boot TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE job_readers (
    reader TEXT NOT NULL,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    PRIMARY KEY (reader, job_id)
) WITHOUT ROWID;
CREATE INDEX job_readers_job ON job_readers (job_id);
"""

# Made in version 5, by migration too.
_COSTS = """
-- Whether a short job waits that may overtake a long one.
CREATE INDEX jobs_cost ON jobs (kind, cost_tokens) WHERE state = 'queued';
"""

# Version → what makes the next one of it.
_MIGRATIONS = {
    1: "ALTER TABLE prefills ADD COLUMN segments TEXT;",
    2: _SERVICE_TABLES,
    3: f"ALTER TABLE jobs ADD COLUMN lease_boot TEXT; DROP INDEX jobs_queued; {_LINES}",
    4: _COSTS,
    5: "ALTER TABLE prefills ADD COLUMN head_map TEXT;",
}


def database_path(data_dir: Path) -> Path:
    return data_dir / "foreword.sqlite"


class DatabaseError(Exception):
    """Base of this module's errors."""

    code = "database_error"


class SchemaTooNew(DatabaseError):
    """The file was written by a newer version of the program."""


class DatabaseUnavailable(DatabaseError, QueueUnavailable):
    """SQLite could not do it now: locked for too long, disk full, file unreadable. Nothing was written."""


class Database:
    """A pool of connections to one file. Every block gets a connection of its own, so threads need no care."""

    def __init__(self, path: Path) -> None:
        """Open, and make or check the schema. Raises SchemaTooNew, DatabaseUnavailable."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._idle: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        # Two processes that make the file at once would meet in the switch to WAL, which doesn't wait.
        with exclusive(path.with_name(f"{path.name}.setup")), self._connection() as connection:
            self._set_up(connection)

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Each statement sees the newest commit; readers never wait for writers."""
        with self._connection() as connection:
            yield connection

    @contextmanager
    def write(self, *, durable: bool) -> Iterator[sqlite3.Connection]:
        """One transaction, committed at the end of the block, rolled back by an exception.

        With `durable` the commit is on disk when the block ends (it survives a power cut); without, it survives
        the death of every process.
        """
        with self._connection() as connection:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = self._connect()
            try:
                yield connection
            finally:
                with self._lock:
                    keep = not self._closed
                    if keep:
                        self._idle.append(connection)
                if not keep:
                    connection.close()
        except sqlite3.OperationalError as error:
            raise DatabaseUnavailable(f"{self.path}: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _set_up(self, connection: sqlite3.Connection) -> None:
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
        except sqlite3.DatabaseError as error:
            raise DatabaseUnavailable(f"{self.path}: {error}") from error
        if version > SCHEMA_VERSION:
            raise SchemaTooNew(
                f"{self.path} has schema version {version}, this program knows up to {SCHEMA_VERSION}: "
                "use the newer program, or another data folder"
            )
        if version == 0:
            connection.execute("PRAGMA journal_mode = WAL")
            tables = f"{_SCHEMA} {_SERVICE_TABLES} {_LINES} {_COSTS}"
            connection.executescript(f"BEGIN IMMEDIATE; {tables} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version < SCHEMA_VERSION:
            steps = " ".join(_MIGRATIONS[old] for old in range(version, SCHEMA_VERSION))
            connection.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")


def rows_of(connection: sqlite3.Connection, table: str, ids: Collection[str]) -> list[sqlite3.Row]:
    """Those of a table's rows that have one of these ids (some thousands at most), by one query; none for no id."""
    if not ids:
        return []
    marks = ", ".join("?" * len(ids))
    return connection.execute(f"SELECT * FROM {table} WHERE id IN ({marks})", tuple(ids)).fetchall()
