"""The index: one SQLite file (WAL) that says which copies of which segments exist, who uses and who holds them.

Shared by every process on the machine: the worker writes and reads KV, the API process describes and releases it.
Files are written before the rows that make them matchable, and rows are taken back before files are removed; so a
crash leaves files without meaning, never meaning without files.

A copy is `writing` (its writer's, or an orphan where `session` is NULL), `stored` (matchable; one a key), or `doomed`
(no longer matchable; removed when its last lease ends). `size_bytes` counts against the cap from the reservation on.
"""

import errno
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.errors import KVError
from engine.interfaces import KVLayout
from engine.kv_store.copies import Copy
from engine.kv_store.counters import Counters
from engine.kv_store.sessions import is_alive

log = logging.getLogger("foreword.kv_store")

BUSY_TIMEOUT_S = 60.0
SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE sessions (id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE copies (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, token_start INTEGER NOT NULL, token_end INTEGER NOT NULL,
    num_layers INTEGER NOT NULL, bytes_per_token INTEGER NOT NULL, layers_per_group INTEGER NOT NULL,
    scale_bytes INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL CHECK (state IN ('writing', 'stored', 'doomed')), doomed_by TEXT,
    size_bytes INTEGER NOT NULL, written_bytes INTEGER NOT NULL DEFAULT 0,
    owner TEXT, session TEXT, created_at REAL NOT NULL, used_at REAL NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX copies_stored_key ON copies (key) WHERE state = 'stored';
CREATE INDEX copies_state ON copies (state, used_at);
CREATE INDEX copies_owner ON copies (owner) WHERE owner IS NOT NULL;
CREATE TABLE leases (
    id TEXT NOT NULL, copy TEXT NOT NULL, session TEXT NOT NULL, PRIMARY KEY (id, copy)
) WITHOUT ROWID;
CREATE INDEX leases_copy ON leases (copy);
CREATE TABLE holders (name TEXT PRIMARY KEY, ttl_s REAL, pinned INTEGER NOT NULL, set_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE holds (key TEXT NOT NULL, holder TEXT NOT NULL, PRIMARY KEY (key, holder)) WITHOUT ROWID;
CREATE INDEX holds_holder ON holds (holder);
CREATE TABLE host_residency (
    session TEXT NOT NULL, copy TEXT NOT NULL, size_bytes INTEGER NOT NULL, PRIMARY KEY (copy, session)
) WITHOUT ROWID;
"""
# What each row of copies means for removal. `:now` is unix seconds.
LEASED = "EXISTS (SELECT 1 FROM leases l WHERE l.copy = copies.id)"
HELD = "EXISTS (SELECT 1 FROM holds h WHERE h.key = copies.key)"
PINNED = "EXISTS (SELECT 1 FROM holds h JOIN holders p ON p.name = h.holder WHERE h.key = copies.key AND p.pinned)"
EXPIRED = f"""({HELD} AND NOT EXISTS (
    SELECT 1 FROM holds h JOIN holders p ON p.name = h.holder WHERE h.key = copies.key
    AND (p.pinned OR p.ttl_s IS NULL OR MAX(p.set_at, copies.used_at) + p.ttl_s > :now)))"""
_COLUMNS = "id, key, token_start, token_end, num_layers, bytes_per_token, layers_per_group, scale_bytes, size_bytes"
# From the version before: the sizes of KV without scales stay as they are.
_FROM_VERSION_1 = "ALTER TABLE copies ADD COLUMN scale_bytes INTEGER NOT NULL DEFAULT 0"


class Index:
    """Transactions on the index; one connection a store, used by one thread at a time."""

    def __init__(
        self, path: Path, session_folder: Path, counters: Counters | None = None, *, several_machines: bool = False
    ) -> None:
        """`several_machines`: they share the file, so that a log in shared memory (WAL) would not do.

        Raises KVError if the file was made by another version.
        """
        self._session_folder, self._counters = session_folder, counters or Counters()
        self._lock = threading.RLock()
        self._db = _open(path, "DELETE" if several_machines else "WAL")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and alone among all processes. Raises OSError where the disk fails."""
        with self._lock, self._disk_errors():
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Consistent reads that block nobody. Raises OSError where the disk fails."""
        with self._lock, self._disk_errors():
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if (code := _disk_error(error)) is None:
                raise
            self._counters.add("index_errors")
            raise OSError(code, f"the index cannot be used: {error}") from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def reap_dead_sessions(self, db: sqlite3.Connection) -> None:
        """End the leases of processes that are gone; what they were writing becomes orphaned."""
        for (session,) in db.execute("SELECT id FROM sessions").fetchall():
            if not is_alive(self._session_folder, session):
                log.info("kv_store: session %s is gone, its leases end", session)
                self._counters.add("dead_sessions")
                end_session(db, session)


def end_session(db: sqlite3.Connection, session: str) -> None:
    db.execute("DELETE FROM leases WHERE session = ?", (session,))
    db.execute("DELETE FROM host_residency WHERE session = ?", (session,))
    db.execute("UPDATE copies SET session = NULL WHERE session = ?", (session,))
    db.execute("DELETE FROM sessions WHERE id = ?", (session,))


def select_copies(db: sqlite3.Connection, condition: str, parameters: dict[str, object]) -> list[Copy]:
    rows = db.execute(f"SELECT {_COLUMNS} FROM copies WHERE {condition}", parameters)
    return [Copy(row[0], row[1], row[2], row[3], KVLayout(row[4], row[5], row[6], row[7]), row[8]) for row in rows]


def stored_copies(db: sqlite3.Connection, keys: Sequence[str], now: float) -> dict[str, Copy]:
    """The matchable copies among `keys`, by key."""
    condition = f"state = 'stored' AND key IN (SELECT value FROM json_each(:keys)) AND NOT {EXPIRED}"
    return {copy.key: copy for copy in select_copies(db, condition, {"keys": json.dumps(list(keys)), "now": now})}


def insert_copy(db: sqlite3.Connection, copy: Copy, owner: str, session: str, now: float) -> None:
    layout = copy.layout
    db.execute(
        f"INSERT INTO copies ({_COLUMNS}, state, owner, session, created_at, used_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'writing', ?, ?, ?, ?)",
        (
            copy.id, copy.key, copy.start, copy.end, layout.num_layers, layout.bytes_per_token,
            layout.layers_per_group, layout.scale_bytes, copy.size_bytes, owner, session, now, now,
        ),
    )  # fmt: skip


def lease_copies(db: sqlite3.Connection, lease: str, session: str, copies: Iterable[Copy]) -> None:
    """Protect `copies` from removal until the lease's rows go."""
    rows = [(lease, copy.id, session) for copy in copies]
    db.executemany("INSERT INTO leases (id, copy, session) VALUES (?, ?, ?)", rows)


def touch(db: sqlite3.Connection, keys: Sequence[str], now: float) -> None:
    """Mark stored segments as used now."""
    db.execute(
        "UPDATE copies SET used_at = ? WHERE state = 'stored' AND key IN (SELECT value FROM json_each(?))",
        (now, json.dumps(list(keys))),
    )


def doom(db: sqlite3.Connection, copy_ids: Iterable[str], reason: str) -> None:
    """Make copies unmatchable; `doomed_by` says why. Their files go when no lease is left."""
    db.executemany(
        "UPDATE copies SET state = 'doomed', doomed_by = ?, owner = NULL, session = NULL"
        " WHERE id = ? AND state != 'doomed'",
        [(reason, copy_id) for copy_id in copy_ids],
    )


def revive_released(db: sqlite3.Connection, keys: Sequence[str]) -> None:
    """Take back the release of segments still leased: somebody else wants them after all."""
    db.execute(
        f"""UPDATE copies SET state = 'stored', doomed_by = NULL
        WHERE state = 'doomed' AND doomed_by = 'released' AND {LEASED}
        AND key IN (SELECT value FROM json_each(?))
        AND NOT EXISTS (SELECT 1 FROM copies c WHERE c.key = copies.key AND c.state = 'stored')
        AND id = (SELECT MIN(c.id) FROM copies c WHERE c.key = copies.key AND c.state = 'doomed'
                  AND c.doomed_by = 'released' AND EXISTS (SELECT 1 FROM leases l WHERE l.copy = c.id))""",
        (json.dumps(list(keys)),),
    )


def total_bytes(db: sqlite3.Connection) -> int:
    """Everything that counts against the cap: stored, being written, not yet removed."""
    total: int = db.execute("SELECT COALESCE(SUM(size_bytes), 0) FROM copies").fetchone()[0]
    return total


_DISK_ERRORS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_CANTOPEN: errno.EIO,
    sqlite3.SQLITE_CORRUPT: errno.EIO,
    sqlite3.SQLITE_NOTADB: errno.EIO,
}


def _disk_error(error: sqlite3.DatabaseError) -> int | None:
    """The errno of an error that is the disk's, not ours."""
    code = getattr(error, "sqlite_errorcode", None)  # errors of the module itself have none
    return None if code is None else _DISK_ERRORS.get(code & 0xFF)  # extended codes keep the primary in the low byte


def _open(path: Path, journal: str) -> sqlite3.Connection:
    try:
        return _connect(path, journal)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise
        # A cache may forget: files without rows are swept, and the documents are prefilled again.
        aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
        log.error("kv_store: the index is damaged (%s); moved to %s, starting empty", error, aside.name)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.rename(aside)
        return _connect(path, journal)


def _connect(path: Path, journal: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        _use_journal(db, journal)
        db.execute(f"PRAGMA synchronous = {'NORMAL' if journal == 'WAL' else 'FULL'}")
        db.execute("BEGIN IMMEDIATE")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
        elif version == 1:
            db.execute(_FROM_VERSION_1)
        if version in (0, 1):
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
        if version not in (0, 1, SCHEMA_VERSION):
            raise KVError(f"{path} has format {version}, expected {SCHEMA_VERSION}; remove the folder to start anew")
    except BaseException:
        db.close()
        raise
    return db


def _use_journal(db: sqlite3.Connection, journal: str) -> None:
    """SQLite does not wait for its lock to change the journal's mode: two processes that open a new folder would not
    both succeed."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            db.execute(f"PRAGMA journal_mode = {journal}")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
