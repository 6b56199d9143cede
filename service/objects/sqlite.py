"""The API's records in the embedded database. Implements service.objects.base.Objects."""

import json
import sqlite3
import time
from collections.abc import Callable, Sequence

from service.database import Database
from service.objects.base import (
    Json,
    ObjectChanged,
    ObjectExists,
    ObjectKind,
    Order,
    StoredObject,
    UnknownObject,
)


class SqliteObjects:
    """The database stays the caller's to close."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def create(
        self, kind: ObjectKind, tenant: str, object_id: str, data: Json, *, due_at: float | None = None
    ) -> StoredObject:
        now = self._clock()
        try:
            with self._database.write(durable=True) as connection:
                connection.execute(
                    "INSERT INTO objects (kind, tenant, id, data, created_at, due_at) VALUES (?, ?, ?, ?, ?, ?)",
                    (kind, tenant, object_id, _encode(data), now, due_at),
                )
        except sqlite3.IntegrityError as error:
            raise ObjectExists(f"{kind} {object_id!r} is there already") from error
        return StoredObject(kind, tenant, object_id, dict(data), 1, now, due_at)

    def get(self, kind: ObjectKind, tenant: str, object_id: str) -> StoredObject:
        with self._database.read() as connection:
            return _get(connection, kind, tenant, object_id)

    def find(
        self, kind: ObjectKind, tenant: str, *, limit: int, after: str | None = None, order: Order = "desc"
    ) -> Sequence[StoredObject]:
        with self._database.read() as connection:
            bound: list[object] = []
            if after is not None:
                last = _get(connection, kind, tenant, after)
                bound = [last.created_at, last.id]
            behind = f"AND (created_at, id) {'>' if order == 'asc' else '<'} (?, ?)" if bound else ""
            rows = connection.execute(
                f"SELECT * FROM objects WHERE kind = ? AND tenant = ? {behind} "
                f"ORDER BY created_at {order}, id {order} LIMIT ?",
                [kind, tenant, *bound, limit],
            ).fetchall()
        return [_decode(row) for row in rows]

    def replace(self, stored: StoredObject, data: Json, *, due_at: float | None) -> StoredObject:
        with self._database.write(durable=True) as connection:
            changed = connection.execute(
                "UPDATE objects SET data = ?, due_at = ?, version = version + 1 "
                "WHERE kind = ? AND tenant = ? AND id = ? AND version = ?",
                (_encode(data), due_at, stored.kind, stored.tenant, stored.id, stored.version),
            ).rowcount
        if not changed:
            raise ObjectChanged(f"{stored.kind} {stored.id!r} is no longer at version {stored.version}")
        return StoredObject(
            stored.kind, stored.tenant, stored.id, dict(data), stored.version + 1, stored.created_at, due_at
        )

    def delete(self, kind: ObjectKind, tenant: str, object_id: str) -> None:
        with self._database.write(durable=True) as connection:
            connection.execute(
                "DELETE FROM objects WHERE kind = ? AND tenant = ? AND id = ?", (kind, tenant, object_id)
            )

    def claim_due(self, kind: ObjectKind, *, lease_s: float, limit: int) -> Sequence[StoredObject]:
        now = self._clock()
        query = "SELECT * FROM objects WHERE kind = ? AND due_at <= ? ORDER BY due_at LIMIT ?"
        with self._database.read() as connection:
            if not connection.execute(query, (kind, now, 1)).fetchall():
                return []
        claimed = []
        with self._database.write(durable=False) as connection:
            for row in connection.execute(query, (kind, now, limit)).fetchall():
                connection.execute(
                    "UPDATE objects SET due_at = ?, version = version + 1 WHERE kind = ? AND tenant = ? AND id = ?",
                    (now + lease_s, kind, row["tenant"], row["id"]),
                )
                claimed.append(_get(connection, kind, row["tenant"], row["id"]))
        return claimed

    def count_due(self, kind: ObjectKind) -> int:
        query = "SELECT count(*) FROM objects WHERE kind = ? AND due_at IS NOT NULL"
        with self._database.read() as connection:
            (count,) = connection.execute(query, (kind,)).fetchone()
        return int(count)


def _get(connection: sqlite3.Connection, kind: str, tenant: str, object_id: str) -> StoredObject:
    row = connection.execute(
        "SELECT * FROM objects WHERE kind = ? AND tenant = ? AND id = ?", (kind, tenant, object_id)
    ).fetchone()
    if row is None:
        raise UnknownObject(f"no {kind} {object_id!r}")
    return _decode(row)


def _decode(row: sqlite3.Row) -> StoredObject:
    return StoredObject(
        row["kind"], row["tenant"], row["id"], json.loads(row["data"]), row["version"], row["created_at"], row["due_at"]
    )


def _encode(data: Json) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)
