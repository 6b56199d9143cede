"""Files, documents and prefills in the embedded database. Implements service.documents.base.Documents."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from sqlite3 import Connection, Row
from typing import Literal

from service.database import Database, rows_of
from service.documents.base import DocumentRecord, FileRecord, Json, PrefillRecord, UnknownRecord
from service.documents.garbage import Garbage
from service.documents.records import apply_changes, decode, derive_status
from service.queue import sqlite_jobs as jobs
from service.queue.base import RecordChange

log = logging.getLogger(__name__)


class SqliteDocuments:
    """Thread-safe; any number of processes. The database stays the caller's to close."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def create_file(self, record: FileRecord) -> None:
        values = {field.name: getattr(record, field.name) for field in fields(record)}
        self._change(RecordChange("files", record.id, {**values, "sources": list(record.sources)}))

    def file(self, tenant: str, file_id: str) -> FileRecord:
        with self._database.read() as connection:
            return _file(connection, tenant, file_id)

    def files(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None,
        order: Literal["asc", "desc"],
        purpose: str | None,
    ) -> Sequence[FileRecord]:
        """By creation time. Raises UnknownRecord when `after` is no file of this tenant."""
        where, values = ["tenant = ?"], [tenant]
        if purpose is not None:
            where.append("purpose = ?")
            values.append(purpose)
        with self._database.read() as connection:
            if after is not None:
                _file(connection, tenant, after)
                sign = ">" if order == "asc" else "<"
                where.append(f"(created_at, id) {sign} (SELECT created_at, id FROM files WHERE id = ?)")
                values.append(after)
            rows = connection.execute(
                f"SELECT * FROM files WHERE {' AND '.join(where)} ORDER BY created_at {order}, id {order} LIMIT ?",
                [*values, limit],
            ).fetchall()
        return [decode(row, FileRecord) for row in rows]

    def update_file(self, file_id: str, fields: Json) -> None:
        """Raises UnknownRecord, and ValueError for a field that doesn't exist."""
        with self._database.write(durable=True) as connection:
            if connection.execute("SELECT 1 FROM files WHERE id = ?", (file_id,)).fetchone() is None:
                raise UnknownRecord(f"no file {file_id!r}")
            _apply(connection, RecordChange("files", file_id, fields))

    def delete_file(self, tenant: str, file_id: str) -> DocumentRecord | None:
        """Remove the handle, and with a document's last one the document, its prefills and the jobs that make them.

        With the last of a fidelity, the work for that ends; with the document, answers about it are scrubbed.

        The bytes become garbage, which `collect` hands out. Returns the document if it went too. Raises UnknownRecord.
        """
        with self._database.write(durable=True) as connection:
            record = _file(connection, tenant, file_id)
            now = self._clock()
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
            _discard(connection, "upload", [file_id])
            if record.ingest_job is not None:
                _scrub(connection, record.ingest_job, now)
            if record.document_id is None:
                return None
            if others := _handles(connection, record.document_id):
                if all(other.fidelity != record.fidelity for other in others):
                    _cancel_prefill(connection, f"{record.document_id}:{record.fidelity}", now)
                return None
            return _delete_document(connection, record.document_id, now)

    def document(self, document_id: str) -> DocumentRecord:
        """Raises UnknownRecord."""
        found = self.known_documents([document_id])
        if not found:
            raise UnknownRecord(f"no document {document_id!r}")
        return found[document_id]

    def prefill(self, prefill_id: str) -> PrefillRecord:
        found = self.known_prefills([prefill_id])
        if not found:
            raise UnknownRecord(f"no prefill {prefill_id!r}")
        return found[prefill_id]

    def known_documents(self, document_ids: Collection[str]) -> Mapping[str, DocumentRecord]:
        return {row["id"]: decode(row, DocumentRecord) for row in self._known("documents", document_ids)}

    def known_prefills(self, prefill_ids: Collection[str]) -> Mapping[str, PrefillRecord]:
        return {row["id"]: decode(row, PrefillRecord) for row in self._known("prefills", prefill_ids)}

    def _known(self, table: str, ids: Collection[str]) -> list[Row]:
        with self._database.read() as connection:
            return rows_of(connection, table, ids)

    def handles(self, document_id: str) -> Sequence[FileRecord]:
        with self._database.read() as connection:
            return _handles(connection, document_id)

    def expired_files(self, now: float) -> Sequence[FileRecord]:
        with self._database.read() as connection:
            rows = connection.execute("SELECT * FROM files WHERE expires_at <= ?", (now,)).fetchall()
        return [decode(row, FileRecord) for row in rows]

    def uploaded_bytes(self, tenant: str | None = None) -> int:
        query = "SELECT coalesce(sum(size_bytes), 0) FROM files WHERE ?1 IS NULL OR tenant = ?1"
        with self._database.read() as connection:
            (total,) = connection.execute(query, (tenant,)).fetchone()
        return int(total)

    def share_holder(self, holder: str, document_ids: Sequence[str]) -> None:
        """`holder` keeps KV of a prefix over these documents; deleting any of them makes it garbage.

        Raises UnknownRecord when one of them is gone already.
        """
        with self._database.write(durable=True) as connection:
            for document_id in document_ids:
                if connection.execute("SELECT 1 FROM documents WHERE id = ?", (document_id,)).fetchone() is None:
                    raise UnknownRecord(f"no document {document_id!r}")
                connection.execute(
                    "INSERT OR IGNORE INTO shared_holders (holder, document_id) VALUES (?, ?)", (holder, document_id)
                )

    def abandon_holder(self, holder: str) -> None:
        with self._database.write(durable=True) as connection:
            if not _is_named(connection, "holder", holder):
                _discard(connection, "holder", [holder])

    def folders(self) -> set[str]:
        """The folders that documents name, relative to the data folder."""
        with self._database.read() as connection:
            return {row["folder"] for row in connection.execute("SELECT folder FROM documents")}

    def collect(self, remove: Callable[[Garbage], None]) -> int:
        """Hand each piece of garbage that nobody names again to `remove`, and forget it. Returns how many.

        Nobody can begin to name it while `remove` runs: the transaction is held. An OSError of `remove` leaves the
        piece for the next time.
        """
        count = 0
        with self._database.read() as connection:
            rows = connection.execute("SELECT id, kind, name FROM garbage ORDER BY id").fetchall()
        for row in rows:
            piece = Garbage(row["kind"], row["name"])
            with self._database.write(durable=False) as connection:
                if not _is_named(connection, piece.kind, piece.name):
                    try:
                        remove(piece)
                    except OSError as error:
                        log.warning("can't remove %s %s, will try again: %s", piece.kind, piece.name, error)
                        continue
                    count += 1
                connection.execute("DELETE FROM garbage WHERE id = ?", (row["id"],))
        return count

    def close(self) -> None:
        """Nothing to do: connections belong to the database."""

    def _change(self, change: RecordChange) -> None:
        with self._database.write(durable=True) as connection:
            _apply(connection, change)


def _apply(connection: Connection, change: RecordChange) -> None:
    for prefill_id in apply_changes(connection, [change]):
        derive_status(connection, prefill_id)


def _file(connection: Connection, tenant: str, file_id: str) -> FileRecord:
    row = connection.execute("SELECT * FROM files WHERE id = ? AND tenant = ?", (file_id, tenant)).fetchone()
    if row is None:
        raise UnknownRecord(f"no file {file_id!r}")
    return decode(row, FileRecord)


def _handles(connection: Connection, document_id: str) -> list[FileRecord]:
    query = "SELECT * FROM files WHERE document_id = ? ORDER BY created_at, id"
    return [decode(row, FileRecord) for row in connection.execute(query, (document_id,))]


def _delete_document(connection: Connection, document_id: str, now: float) -> DocumentRecord:
    row = connection.execute("SELECT * FROM documents WHERE id = ?", (document_id,)).fetchone()
    document = decode(row, DocumentRecord)
    prefills = connection.execute("SELECT id FROM prefills WHERE document_id = ?", (document_id,)).fetchall()
    shared = connection.execute("SELECT holder FROM shared_holders WHERE document_id = ?", (document_id,)).fetchall()
    for prefill in prefills:
        _cancel_prefill(connection, prefill["id"], now)
    _discard(connection, "folder", [document.folder])
    _discard(connection, "holder", [row["id"] for row in prefills] + [row["holder"] for row in shared])
    connection.executemany("DELETE FROM shared_holders WHERE holder = ?", [(row["holder"],) for row in shared])
    connection.execute("DELETE FROM documents WHERE id = ?", (document_id,))
    jobs.scrub_document(connection, document_id, now)
    return document


def _cancel_prefill(connection: Connection, prefill_id: str, now: float) -> None:
    row = connection.execute("SELECT job_id FROM prefills WHERE id = ?", (prefill_id,)).fetchone()
    if row is not None and row["job_id"] is not None:
        _cancel(connection, row["job_id"], now)


def _cancel(connection: Connection, job_id: str, now: float) -> None:
    if _is_known(connection, job_id):
        jobs.cancel(connection, job_id, now)


def _scrub(connection: Connection, job_id: str, now: float) -> None:
    if _is_known(connection, job_id):
        jobs.scrub(connection, job_id, now)


def _is_known(connection: Connection, job_id: str) -> bool:
    return connection.execute("SELECT 1 FROM jobs WHERE id = ?", (job_id,)).fetchone() is not None


def _discard(connection: Connection, kind: str, names: Sequence[str]) -> None:
    connection.executemany("INSERT INTO garbage (kind, name) VALUES (?, ?)", [(kind, name) for name in names])


def _is_named(connection: Connection, kind: str, name: str) -> bool:
    query = {
        "upload": "SELECT 1 FROM files WHERE id = :name",
        "folder": "SELECT 1 FROM documents WHERE folder = :name",
        "holder": "SELECT 1 FROM prefills WHERE id = :name UNION ALL SELECT 1 FROM shared_holders WHERE holder = :name",
    }[kind]
    return connection.execute(query, {"name": name}).fetchone() is not None
