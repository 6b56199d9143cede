"""Jobs and effects as the scripts take and give them: hashes of text, and JSON."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from service.documents.records import encode_fields
from service.queue.base import Effects, Event, Job, Json, NewJob
from service.queue.redis_store import dumps


def encode_job(job: NewJob) -> dict[str, Any]:
    """Raises ValueError. An id is made here, so that a put sent again is known as the same."""
    if job.max_attempts < 1:
        raise ValueError(f"max_attempts is {job.max_attempts}; expected at least 1")
    documents = job.payload.get("documents", []) if job.kind == "answer" else []
    values = {
        "id": job.job_id or f"job-{uuid.uuid4().hex[:24]}",
        "kind": job.kind,
        "tenant": job.tenant,
        "payload": dumps(job.payload),
        "priority": str(job.priority),
        "cost_tokens": str(job.cost_tokens),
        "max_attempts": str(job.max_attempts),
        "single_flight": job.single_flight,
        "affinity": job.affinity,
        "reader": job.reader,
        "documents": documents,
    }
    return {name: value for name, value in values.items() if value is not None}


def encode_effects(effects: Effects) -> str:
    """Raises ValueError for a table or column that doesn't exist."""
    changes = [{"table": change.table, "id": change.id, "fields": encode_fields(change)} for change in effects.changes]
    return dumps({"changes": changes, "put": [encode_job(job) for job in effects.put]})


def decode_job(fields: Mapping[str, str]) -> Job:
    def optional(name: str) -> Json | None:
        return json.loads(fields[name]) if name in fields else None

    def moment(name: str) -> float | None:
        return float(fields[name]) if name in fields else None

    return Job(
        id=fields["id"],
        kind=fields["kind"],  # type: ignore[arg-type]
        tenant=fields["tenant"],
        payload=json.loads(fields["payload"]),
        priority=int(fields["priority"]),
        state=fields["state"],  # type: ignore[arg-type]
        attempts=int(fields["attempts"]),
        epoch=int(fields["epoch"]),
        progress=float(fields.get("progress", 0.0)),
        detail=optional("detail") or {},
        result=optional("result"),
        error=optional("error"),
        created_at=float(fields["created_at"]),
        started_at=moment("started_at"),
        finished_at=moment("finished_at"),
        cancel_requested=fields.get("cancel_requested") == "1",
        worker=fields.get("worker"),
    )


def decode_event(entry: tuple[bytes, Mapping[bytes, bytes]]) -> Event:
    seq, fields = entry
    return Event(int(seq.partition(b"-")[0]), fields[b"t"].decode(), json.loads(fields[b"d"]))


def encode_events(events: Sequence[tuple[str, Json]]) -> str:
    return dumps([[kind, dumps(data)] for kind, data in events])
