"""Rows of files, documents and prefills, inside a transaction that the caller holds.

The status of a file follows from its document's prefill, and the state of a prefill from its job. Both are derived
here, in the transaction that changes the cause, so no order of events can leave a handle waiting for ever.
"""

import dataclasses
import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from service.documents.base import DocumentRecord, FileRecord, PrefillRecord
from service.queue.base import Json, RecordChange


@dataclass(frozen=True)
class Table:
    record: type
    json: frozenset[str]  # columns that hold JSON
    once: frozenset[str]  # set when the row is made, kept for good
    owner: str  # without this field a row can't be made

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(field.name for field in dataclasses.fields(self.record))


TABLES = {
    "files": Table(FileRecord, frozenset({"sources", "error"}), frozenset({"id", "tenant", "created_at"}), "tenant"),
    # A document's id covers its content, so whoever comes second keeps the first one's folder.
    "documents": Table(
        DocumentRecord,
        frozenset({"stage_seconds"}),
        frozenset({"id", "tenant", "folder", "created_at", "stage_seconds"}),
        "tenant",
    ),
    "prefills": Table(
        PrefillRecord,
        frozenset({"recall", "heads", "error", "segments", "head_map"}),
        frozenset({"id", "tenant", "document_id", "fidelity"}),
        "document_id",
    ),
}

Record = TypeVar("Record", FileRecord, DocumentRecord, PrefillRecord)


def table_of(change: RecordChange) -> Table:
    """Raises ValueError for a table or column that doesn't exist."""
    table = TABLES.get(change.table)
    if table is None:
        raise ValueError(f"no table {change.table!r}; expected one of {', '.join(TABLES)}")
    unknown = sorted(set(change.fields) - table.columns)
    if unknown:
        raise ValueError(f"{change.table} has no column {', '.join(unknown)}")
    return table


def encode_fields(change: RecordChange) -> dict[str, str]:
    """Each field as JSON, for a store that keeps text. Raises ValueError."""
    table_of(change)
    return {
        name: json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        for name, value in change.fields.items()
        if name != "id"
    }


def decode(row: sqlite3.Row, record: type[Record]) -> Record:
    table = next(table for table in TABLES.values() if table.record is record)
    values: dict[str, Any] = {}
    for name, value in zip(row.keys(), row, strict=True):
        values[name] = json.loads(value) if name in table.json and value is not None else value
    if record is FileRecord:
        values["pinned"] = bool(values["pinned"])
    return record(**values)


def apply_changes(connection: sqlite3.Connection, changes: Iterable[RecordChange]) -> set[str]:
    """Set fields of rows, made where they aren't there. Returns the prefills whose `derive_status` is now due.

    A change that doesn't name the row's owner is for a row that exists: where it was deleted meanwhile, the change has
    nothing left to say. Raises ValueError for a table or column that doesn't exist.
    """
    return {prefill for change in changes if (prefill := _apply(connection, change)) is not None}


def _apply(connection: sqlite3.Connection, change: RecordChange) -> str | None:
    table = table_of(change)
    encoded = {
        name: json.dumps(value) if name in table.json and value is not None else value
        for name, value in change.fields.items()
    }
    updates = {name: value for name, value in encoded.items() if name not in table.once}
    if not _update(connection, change, updates):
        if table.owner not in encoded:
            return None
        names = ["id", *(name for name in encoded if name != "id")]
        values = [change.id, *(encoded[name] for name in names[1:])]
        marks = ", ".join("?" * len(names))
        connection.execute(f"INSERT INTO {change.table} ({', '.join(names)}) VALUES ({marks})", values)
    if change.table == "prefills":
        return change.id
    if change.table == "files":
        row = connection.execute("SELECT document_id, fidelity FROM files WHERE id = ?", (change.id,)).fetchone()
        if row["document_id"] is not None:
            return f"{row['document_id']}:{row['fidelity']}"
    return None


def _update(connection: sqlite3.Connection, change: RecordChange, fields: Json) -> bool:
    """True if the row exists."""
    if not fields:
        return connection.execute(f"SELECT 1 FROM {change.table} WHERE id = ?", (change.id,)).fetchone() is not None
    sets = ", ".join(f"{name} = ?" for name in fields)
    cursor = connection.execute(f"UPDATE {change.table} SET {sets} WHERE id = ?", [*fields.values(), change.id])
    return cursor.rowcount == 1


def derive_status(connection: sqlite3.Connection, prefill_id: str) -> None:
    """Waiting handles of a finished prefill become `processed` or `error`; those states are final."""
    row = connection.execute(
        "SELECT document_id, fidelity, state, error FROM prefills WHERE id = ?", (prefill_id,)
    ).fetchone()
    if row is None:
        return
    if row["state"] == "ready":
        changes: tuple[str, str | None, str | None] = ("processed", None, None)
    elif row["state"] in ("error", "cancelled"):
        changes = ("error", _message(row["error"]), row["error"])
    else:
        return
    connection.execute(
        "UPDATE files SET status = ?, status_details = ?, error = ? "
        "WHERE document_id = ? AND fidelity = ? AND status = 'uploaded'",
        (*changes, row["document_id"], row["fidelity"]),
    )


def follow_job(
    connection: sqlite3.Connection, job_id: str, prefill_id: str | None, state: str, error: str | None
) -> None:
    """A job came into `state`: its prefill record follows, and so do the files that its ingest was for.

    `prefill_id` is given when the job is put: the record, if it exists, takes this job as its own.
    `error` is JSON. A job's success is no news here: its effects say what became of the records.
    """
    prefill_state = {"failed": "error", "dead": "error"}.get(state, state)
    if prefill_id is not None:
        connection.execute("UPDATE prefills SET job_id = ? WHERE id = ?", (job_id, prefill_id))
    if state == "succeeded":
        return
    changed = connection.execute(
        "UPDATE prefills SET state = ?, error = ? WHERE job_id = ? RETURNING id", (prefill_state, error, job_id)
    ).fetchall()
    for row in changed:
        derive_status(connection, row["id"])
    if prefill_state in ("error", "cancelled"):
        connection.execute(
            "UPDATE files SET status = 'error', status_details = ?, error = ? "
            "WHERE ingest_job = ? AND status = 'uploaded' AND document_id IS NULL",
            (_message(error), error, job_id),
        )


def reopen_files(connection: sqlite3.Connection, job_id: str) -> None:
    """Handles whose ingest or prefill ended in this job's failure wait again."""
    connection.execute(
        "UPDATE files SET status = 'uploaded', status_details = NULL, error = NULL WHERE status = 'error' AND ("
        "ingest_job = :job AND document_id IS NULL OR EXISTS (SELECT 1 FROM prefills WHERE prefills.job_id = :job "
        "AND prefills.document_id = files.document_id AND prefills.fidelity = files.fidelity))",
        {"job": job_id},
    )


def _message(error: str | None) -> str | None:
    return None if error is None else json.loads(error).get("message")
