"""Files, documents and prefills in Redis. Implements service.documents.base.Documents.

Bytes that nobody names become garbage as they do in the embedded store. KV lies on several machines: each *site* (a
folder of KV, which all workers on one machine may share) has a list of its own of the holders that it must let go.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar

from service.documents.base import DocumentRecord, FileRecord, Json, PrefillRecord, UnknownRecord
from service.documents.garbage import Garbage
from service.documents.records import encode_fields
from service.queue.base import RecordChange
from service.queue.redis_store import RedisStore, dumps, fields_of

log = logging.getLogger(__name__)

PAGE = 500
Record = TypeVar("Record", FileRecord, DocumentRecord, PrefillRecord)


class RedisDocuments:
    """Thread-safe; any number of processes and machines. The store stays the caller's to close."""

    def __init__(self, store: RedisStore, *, site: str = "") -> None:
        """`site` names this process's KV folder; an API process has none."""
        self._store = store
        self._site = site

    def create_file(self, record: FileRecord) -> None:
        values = {field.name: getattr(record, field.name) for field in fields(record)}
        self._change("files", record.id, {**values, "sources": list(record.sources)}, must_exist=False)

    def file(self, tenant: str, file_id: str) -> FileRecord:
        (record,) = self._read("files", [file_id], FileRecord)
        if record is None or record.tenant != tenant:
            raise UnknownRecord(f"no file {file_id!r}")
        return record

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
        listing, start, found = self._store.key("files_of", tenant), 0, list[FileRecord]()
        if after is not None:
            rank = self._store.command(_RANK[order], listing, after)
            if rank is None:
                raise UnknownRecord(f"no file {after!r}")
            start = rank + 1
        size = limit if purpose is None else PAGE
        while len(found) < limit:
            last = start + size - 1
            ids = self._range(listing, order, start, last)
            page = self._read("files", [file_id.decode() for file_id in ids], FileRecord)
            found += [record for record in page if record is not None and purpose in (None, record.purpose)]
            if len(ids) < size:
                break
            start += size
        return found[:limit]

    def _range(self, listing: str, order: Literal["asc", "desc"], first: int, last: int) -> list[bytes]:
        found: list[bytes] = self._store.command(_RANGE[order], listing, first, last)
        return found

    def update_file(self, file_id: str, fields: Json) -> None:
        """Raises UnknownRecord, and ValueError for a field that doesn't exist."""
        self._change("files", file_id, fields, must_exist=True)

    def delete_file(self, tenant: str, file_id: str) -> DocumentRecord | None:
        """Remove the handle, and with a document's last one the document, its prefills and the jobs that make them.

        With the last of a fidelity, the work for that ends; with the document, answers about it are scrubbed.

        The bytes become garbage, which `collect` hands out. Returns the document if it went too. Raises UnknownRecord.
        """
        status, *gone = self._store.run_once("delete_file", tenant, file_id)
        if status == b"unknown":
            raise UnknownRecord(f"no file {file_id!r}")
        if not gone[0]:
            return None
        document_id, *flat = json.loads(gone[0])
        return decode(document_id, dict(zip(flat[::2], flat[1::2], strict=True)), DocumentRecord)

    def document(self, document_id: str) -> DocumentRecord:
        (record,) = self._read("documents", [document_id], DocumentRecord)
        if record is None:
            raise UnknownRecord(f"no document {document_id!r}")
        return record

    def prefill(self, prefill_id: str) -> PrefillRecord:
        (record,) = self._read("prefills", [prefill_id], PrefillRecord)
        if record is None:
            raise UnknownRecord(f"no prefill {prefill_id!r}")
        return record

    def known_documents(self, document_ids: Collection[str]) -> Mapping[str, DocumentRecord]:
        return self._known("documents", document_ids, DocumentRecord)

    def known_prefills(self, prefill_ids: Collection[str]) -> Mapping[str, PrefillRecord]:
        return self._known("prefills", prefill_ids, PrefillRecord)

    def _known(self, table: str, ids: Collection[str], record: type[Record]) -> Mapping[str, Record]:
        found = self._read(table, list(ids), record)
        return {record_id: known for record_id, known in zip(ids, found, strict=True) if known is not None}

    def handles(self, document_id: str) -> Sequence[FileRecord]:
        ids = self._store.command("smembers", self._store.key("handles", document_id))
        records = self._read("files", [file_id.decode() for file_id in ids], FileRecord)
        return sorted((record for record in records if record is not None), key=lambda file: (file.created_at, file.id))

    def expired_files(self, now: float) -> Sequence[FileRecord]:
        name = self._store.key("file_expiry")
        ids = self._store.command("zrangebyscore", name, "-inf", now, start=0, num=PAGE)
        records = self._read("files", [file_id.decode() for file_id in ids], FileRecord)
        return [record for record in records if record is not None]

    def uploaded_bytes(self, tenant: str | None = None) -> int:
        if tenant is None:
            return int(self._store.command("get", self._store.key("uploaded_bytes")) or 0)
        return int(self._store.command("hget", self._store.key("uploaded_bytes_of"), tenant) or 0)

    def share_holder(self, holder: str, document_ids: Sequence[str]) -> None:
        """`holder` keeps KV of a prefix over these documents; deleting any of them makes it garbage.

        Raises UnknownRecord when one of them is gone already.
        """
        status, *missing = self._store.run("hold", holder, dumps(list(document_ids)))
        if status == b"unknown":
            raise UnknownRecord(f"no document {missing[0].decode()!r}")

    def abandon_holder(self, holder: str) -> None:
        self._store.run("garbage", "abandon", f"holder:{holder}", self._site)

    def folders(self) -> set[str]:
        """The folders that documents name, relative to the folder of files."""
        names = self._store.command("hkeys", self._store.key("folders"))
        return {name.decode() for name in names}

    def collect(self, remove: Callable[[Garbage], None]) -> int:
        """Hand each piece of garbage that nobody names again to `remove`, and forget it. Returns how many.

        Nobody can begin to name it while `remove` runs: records of its name wait. An OSError of `remove` leaves the
        piece for the next time. Of KV only this site's pieces are handed out.
        """
        count = 0
        for name in (self._store.key("garbage"), self._store.key("garbage_at", self._site)):
            for piece in self._store.command("zrange", name, 0, PAGE):
                count += self._collect_one(piece.decode(), remove)
        return count

    def _collect_one(self, piece: str, remove: Callable[[Garbage], None]) -> int:
        if self._store.run("garbage", "begin", piece, self._site)[0] != b"ok":
            return 0  # named again, or another worker is at it
        kind, _, name = piece.partition(":")
        ended = "later"
        try:
            remove(Garbage(kind, name))  # type: ignore[arg-type]
            ended = "done"
        except OSError as error:
            log.warning("can't remove %s %s, will try again: %s", kind, name, error)
        finally:
            self._store.run("garbage", ended, piece, self._site)
        return int(ended == "done")

    def close(self) -> None:
        """Nothing to do: the connection belongs to the store."""

    def _change(self, table: Literal["files"], record_id: str, values: Json, *, must_exist: bool) -> None:
        change = RecordChange(table, record_id, values)
        text = dumps({"table": table, "id": record_id, "fields": encode_fields(change)})
        if self._store.run("change", text, int(must_exist))[0] == b"unknown":
            raise UnknownRecord(f"no file {record_id!r}")

    def _read(self, table: str, ids: Sequence[str], record: type[Record]) -> list[Record | None]:
        def read(client: Any) -> Any:
            with client.pipeline(transaction=False) as pipe:
                for record_id in ids:
                    pipe.hgetall(self._store.key(table, record_id))
                return pipe.execute()

        found = self._store.ask(read) if ids else []
        return [
            decode(record_id, fields_of(row), record) if row else None
            for record_id, row in zip(ids, found, strict=True)
        ]


_RANK = {"asc": "zrank", "desc": "zrevrank"}
_RANGE = {"asc": "zrange", "desc": "zrevrange"}


def decode(record_id: str, row: dict[str, str], record: type[Record]) -> Record:
    """A hash of JSON fields; what was never set is null, or the field's own default."""
    values: dict[str, Any] = {"id": record_id}
    for field in fields(record):
        if field.name in row:
            values[field.name] = json.loads(row[field.name])
        elif field.name != "id" and field.default is MISSING:
            values[field.name] = None
    return record(**values)
