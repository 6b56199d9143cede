"""Rows of jobs and events, inside a transaction that the caller holds. The caller adds wake-ups after commit."""

import json
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from sqlite3 import Connection, Row

from service.documents.records import apply_changes, derive_status, follow_job, reopen_files
from service.queue.base import (
    SCRUBBED,
    Effects,
    Event,
    Job,
    JobState,
    Json,
    LeaseLost,
    NewJob,
    NotRequeued,
    UnknownJob,
)
from service.queue.fairness import choose
from service.queue.machine_clock import boot_id

LONGEST_REST_S = 60.0  # service.queue.base.retry_delay_s
# May be claimed at :now, in seconds since the boot. A rest that seems longer was begun before the last one.
_RESTED = f"(not_before <= :now OR not_before > :now + {LONGEST_REST_S})"
_PLACE = "created_at - 30.0 * priority"  # as the index jobs_line has it


def decode(row: Row) -> Job:
    return Job(
        id=row["id"],
        kind=row["kind"],
        tenant=row["tenant"],
        payload=json.loads(row["payload"]),
        priority=row["priority"],
        state=row["state"],
        attempts=row["attempts"],
        epoch=row["epoch"],
        progress=row["progress"],
        detail=json.loads(row["detail"]),
        result=None if row["result"] is None else json.loads(row["result"]),
        error=None if row["error"] is None else json.loads(row["error"]),
        created_at=row["created_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        cancel_requested=bool(row["cancel_requested"]),
        worker=row["worker"],
    )


def decode_event(row: Row) -> Event:
    return Event(row["seq"], row["type"], json.loads(row["data"]))


def message(error: str) -> str:
    return str(json.loads(error).get("message", ""))


def encode(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def fetch(connection: Connection, job_id: str) -> Row:
    row: Row | None = connection.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise UnknownJob(f"no job {job_id!r}")
    return row


def fetch_held(connection: Connection, job: Job) -> Row:
    """The row, if this attempt still owns the job. Raises LeaseLost."""
    row: Row | None = connection.execute("SELECT * FROM jobs WHERE id = ?", (job.id,)).fetchone()
    if row is None:
        raise LeaseLost(f"job {job.id} is gone")
    if row["state"] != "running" or row["epoch"] != job.epoch:
        raise LeaseLost(f"job {job.id}: epoch {job.epoch} no longer holds it ({row['state']}, epoch {row['epoch']})")
    return row


def put(connection: Connection, job: NewJob, effects: Effects, now: float) -> tuple[Job, list[str]]:
    """The new or existing job, and all jobs that were put."""
    if job.job_id is not None:
        existing = connection.execute("SELECT * FROM jobs WHERE id = ?", (job.job_id,)).fetchone()
        if existing is not None:
            _read_by(connection, job.job_id, job.reader)
            return decode(existing), []
    job_id, follow_ups = _apply(connection, Effects(effects.changes, [job, *effects.put]), now)
    return decode(fetch(connection, job_id)), follow_ups


def apply_effects(connection: Connection, effects: Effects, now: float) -> list[str]:
    """Returns the jobs that were put."""
    return _apply(connection, effects, now)[1]


def _apply(connection: Connection, effects: Effects, now: float) -> tuple[str, list[str]]:
    """(id of the first job of `effects.put`, new or existing; ids of the new ones)."""
    # A new prefill job resets its record's state, so statuses are derived behind both.
    due = apply_changes(connection, effects.changes)
    first, added = "", []
    for new in effects.put:
        job_id, is_new = _insert(connection, new, now)
        first = first or job_id
        if is_new:
            added.append(job_id)
    for prefill_id in due:
        derive_status(connection, prefill_id)
    return first, added


def _insert(connection: Connection, job: NewJob, now: float) -> tuple[str, bool]:
    if job.max_attempts < 1:
        raise ValueError(f"max_attempts is {job.max_attempts}; expected at least 1")
    if job.job_id is not None and connection.execute("SELECT 1 FROM jobs WHERE id = ?", (job.job_id,)).fetchone():
        return job.job_id, False
    if job.single_flight is not None:
        running = connection.execute(
            "SELECT id FROM jobs WHERE single_flight = ? AND state IN ('queued', 'running')", (job.single_flight,)
        ).fetchone()
        if running is not None:
            return running["id"], False
    job_id = job.job_id or f"job-{uuid.uuid4().hex[:24]}"
    connection.execute(
        "INSERT INTO jobs (id, kind, tenant, payload, priority, cost_tokens, state, max_attempts, single_flight, "
        "created_at) VALUES (?, ?, ?, ?, ?, ?, 'queued', ?, ?, ?)",
        (
            job_id,
            job.kind,
            job.tenant,
            encode(job.payload),
            job.priority,
            job.cost_tokens,
            job.max_attempts,
            job.single_flight,
            now,
        ),
    )
    if job.kind == "answer":
        connection.executemany(
            "INSERT OR IGNORE INTO job_documents (job_id, document_id) VALUES (?, ?)",
            [(job_id, document_id) for document_id in job.payload.get("documents", [])],
        )
    _read_by(connection, job_id, job.reader)
    follow_job(connection, job_id, job.single_flight if job.kind == "prefill" else None, "queued", None)
    append_events(connection, job_id, [("state", {"state": "queued", "attempt": 0})])
    return job_id, True


def _read_by(connection: Connection, job_id: str, reader: str | None) -> None:
    if reader is None:
        return
    connection.execute("INSERT OR IGNORE INTO job_readers (reader, job_id) VALUES (?, ?)", (reader, job_id))


def attend(connection: Connection, reader: str, until: float) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO readers (name, until, boot) VALUES (?, ?, ?)", (reader, until, boot_id())
    )


def cancel_unread(connection: Connection, now: float, uptime: float) -> list[str]:
    """End the jobs that only readers wanted who are gone. Returns them."""
    gone = "(SELECT name FROM readers WHERE until < :uptime OR boot != :boot)"
    values = {"uptime": uptime, "boot": boot_id()}
    rows = connection.execute(
        f"SELECT id FROM jobs WHERE state IN ('queued', 'running') AND id IN (SELECT job_id FROM job_readers "
        f"WHERE reader IN {gone}) AND NOT EXISTS (SELECT 1 FROM job_readers other WHERE other.job_id = jobs.id "
        f"AND other.reader NOT IN {gone})",
        values,
    ).fetchall()
    error = {"code": "abandoned", "message": "the server that this was read from is gone"}
    for row in rows:
        cancel(connection, row["id"], now, error=error)
    connection.execute(f"DELETE FROM job_readers WHERE reader IN {gone}", values)
    connection.execute("DELETE FROM readers WHERE until < :uptime OR boot != :boot", values)
    return [row["id"] for row in rows]


def any_reader_gone(connection: Connection, uptime: float) -> bool:
    query = "SELECT 1 FROM readers WHERE until < ? OR boot != ?"
    return connection.execute(query, (uptime, boot_id())).fetchone() is not None


def has_queued(connection: Connection, kinds: Sequence[str], uptime: float, below: int | None = None) -> bool:
    """Whether one may be claimed now (that costs less than `below`)."""
    index, cheap = ("jobs_line", "") if below is None else ("jobs_cost", "AND cost_tokens < :below ")
    query = (
        f"SELECT 1 FROM jobs INDEXED BY {index} "
        f"WHERE state = 'queued' AND kind IN (SELECT value FROM json_each(:kinds)) {cheap}AND {_RESTED} LIMIT 1"
    )
    values = {"kinds": json.dumps(list(kinds)), "now": uptime, "below": below}
    return connection.execute(query, values).fetchone() is not None


def pick(
    connection: Connection,
    kinds: Sequence[str],
    uptime: float,
    below: int | None = None,
    without: Collection[str] = (),
) -> str | None:
    """The next queued job of these kinds: tenants in fair turns, of each the first of its line (that costs less)."""
    waiting = heads(connection, kinds, uptime, below, without)
    if not waiting:
        return None
    costs = {tenant: row["cost_tokens"] for tenant, row in waiting.items()}
    lane = ",".join(sorted(kinds)) + ("" if below is None else "<") + ("-" if without else "")
    return str(waiting[_fair_tenant(connection, lane, costs)]["id"])


def heads(
    connection: Connection, kinds: Sequence[str], uptime: float, below: int | None, without: Collection[str]
) -> dict[str, Row]:
    """The first queued job of each tenant."""
    found: dict[str, Row] = {}
    for kind in kinds:
        for row in _heads(connection, kind, uptime, below):
            other = found.get(row["tenant"])
            if row["tenant"] not in without and (other is None or row["place"] < other["place"]):
                found[row["tenant"]] = row
    return found


def _heads(connection: Connection, kind: str, uptime: float, below: int | None) -> Iterator[Row]:
    """The first job of each tenant, by index look-ups alone, however long the queue is.

    With `below` the lines are gone along instead; who has looked with `has_queued` knows that it is for something.
    """
    cheap = "" if below is None else "AND cost_tokens < :below "
    query = (
        f"SELECT tenant, id, cost_tokens, {_PLACE} AS place FROM jobs INDEXED BY jobs_line "
        f"WHERE state = 'queued' AND kind = :kind AND tenant > :tenant {cheap}AND {_RESTED} "
        f"ORDER BY tenant, {_PLACE} LIMIT 1"
    )
    values = {"kind": kind, "tenant": "", "now": uptime, "below": below}
    while (row := connection.execute(query, values).fetchone()) is not None:
        yield row
        values["tenant"] = row["tenant"]


def _fair_tenant(connection: Connection, lane: str, costs: dict[str, int]) -> str:
    stored = connection.execute("SELECT tenant, deficit, current FROM fairness WHERE lane = ?", (lane,)).fetchall()
    current = next((row["tenant"] for row in stored if row["current"]), None)
    choice = choose(costs, {row["tenant"]: row["deficit"] for row in stored}, current)
    connection.execute("DELETE FROM fairness WHERE lane = ?", (lane,))
    connection.executemany(
        "INSERT INTO fairness (lane, tenant, deficit, current) VALUES (?, ?, ?, ?)",
        [(lane, tenant, deficit, tenant == choice.tenant) for tenant, deficit in choice.deficits.items()],
    )
    return choice.tenant


def start(connection: Connection, job_id: str, worker: str, lease_until: float, now: float) -> Job:
    """`lease_until` in seconds since the boot, `now` in unix seconds."""
    connection.execute(
        "UPDATE jobs SET state = 'running', attempts = attempts + 1, epoch = epoch + 1, worker = ?, lease_until = ?, "
        "lease_boot = ?, started_at = coalesce(started_at, ?) WHERE id = ?",
        (worker, lease_until, boot_id(), now, job_id),
    )
    row = fetch(connection, job_id)
    follow_job(connection, job_id, None, "running", None)
    append_events(connection, job_id, [("state", {"state": "running", "attempt": row["attempts"]})])
    return decode(row)


def expired(connection: Connection, uptime: float) -> list[Row]:
    """Running jobs whose lease has ended, by its time or with the boot that it was given in."""
    query = "SELECT * FROM jobs WHERE state = 'running' AND (lease_until < ? OR lease_boot IS NOT ?)"
    rows: list[Row] = connection.execute(query, (uptime, boot_id())).fetchall()
    return rows


def requeue(
    connection: Connection, row: Row, error: str | None, *, count_attempt: bool = True, not_before: float = 0.0
) -> None:
    attempts = row["attempts"] if count_attempt else row["attempts"] - 1
    connection.execute(
        "UPDATE jobs SET state = 'queued', epoch = epoch + 1, attempts = ?, worker = NULL, lease_until = NULL, "
        "error = coalesce(?, error), not_before = ? WHERE id = ?",
        (attempts, error, not_before, row["id"]),
    )
    follow_job(connection, row["id"], None, "queued", None)
    append_events(connection, row["id"], [("state", {"state": "queued", "attempt": attempts})])


def end(
    connection: Connection,
    job_id: str,
    state: JobState,
    now: float,
    *,
    result: Json | None = None,
    error: Json | None = None,
) -> None:
    """Into a final state; the epoch is raised, so that whoever still runs it has lost it."""
    error_text = None if error is None else encode(error)
    connection.execute(
        "UPDATE jobs SET state = ?, epoch = epoch + 1, result = ?, error = ?, worker = NULL, lease_until = NULL, "
        "finished_at = ?, progress = CASE WHEN ? = 'succeeded' THEN 1.0 ELSE progress END WHERE id = ?",
        (state, None if result is None else encode(result), error_text, now, state, job_id),
    )
    follow_job(connection, job_id, None, state, error_text)
    append_events(connection, job_id, [("done", {"state": state, "error": error})])


CANCELLED: Json = {"code": "cancelled", "message": "the job was cancelled"}


def cancel(connection: Connection, job_id: str, now: float, *, error: Json = CANCELLED) -> bool:
    """False where the job had ended already."""
    row = fetch(connection, job_id)
    if row["state"] not in ("queued", "running"):
        return False
    connection.execute("UPDATE jobs SET cancel_requested = 1 WHERE id = ?", (job_id,))
    end(connection, job_id, "cancelled", now, error=error)
    return True


def append_events(connection: Connection, job_id: str, events: Iterable[tuple[str, Json]]) -> None:
    (last,) = connection.execute("SELECT last_seq FROM jobs WHERE id = ?", (job_id,)).fetchone()
    rows = [(job_id, seq, kind, encode(data)) for seq, (kind, data) in enumerate(events, last + 1)]
    connection.executemany("INSERT INTO events (job_id, seq, type, data) VALUES (?, ?, ?, ?)", rows)
    connection.execute("UPDATE jobs SET last_seq = ? WHERE id = ?", (last + len(rows), job_id))


def begin_anew(connection: Connection, job_id: str) -> None:
    """A failed or dead job back into the queue. Raises UnknownJob, NotRequeued."""
    row = fetch(connection, job_id)
    if row["state"] not in ("failed", "dead"):
        raise NotRequeued(f"job {job_id} is {row['state']}: 'failed' or 'dead' is expected")
    if row["payload"] == encode(SCRUBBED):
        raise NotRequeued(f"job {job_id} was forgotten: its document is deleted")
    rival = connection.execute(
        "SELECT id FROM jobs WHERE single_flight = ? AND state IN ('queued', 'running')", (row["single_flight"],)
    ).fetchone()
    if rival is not None:
        raise NotRequeued(f"job {rival['id']} does the work of {job_id} already")
    connection.execute(
        "UPDATE jobs SET state = 'queued', epoch = epoch + 1, attempts = 0, error = NULL, not_before = 0, "
        "finished_at = NULL, progress = 0 WHERE id = ?",
        (job_id,),
    )
    reopen_files(connection, job_id)
    follow_job(connection, job_id, None, "queued", None)
    append_events(connection, job_id, [("state", {"state": "queued", "attempt": 0})])


def scrub(connection: Connection, job_id: str, now: float, *, error: Json = CANCELLED) -> None:
    """`error` is what an unfinished job ends with. Raises UnknownJob."""
    cancel(connection, job_id, now, error=error)
    connection.execute(
        "UPDATE jobs SET payload = :nothing, result = CASE WHEN result IS NOT NULL THEN :nothing END WHERE id = :id",
        {"nothing": encode(SCRUBBED), "id": job_id},
    )
    # A progress note names files of an archive.
    connection.execute(
        "UPDATE events SET data = CASE type WHEN 'token' THEN '{\"text\":\"\"}' ELSE json_remove(data, '$.note') END "
        "WHERE job_id = ? AND type IN ('token', 'progress')",
        (job_id,),
    )


def scrub_document(connection: Connection, document_id: str, now: float) -> None:
    """Every answer about a document that is deleted."""
    error = {"code": "document_deleted", "message": "the document was deleted while its answer was made"}
    query = "SELECT job_id FROM job_documents WHERE document_id = ?"
    for row in connection.execute(query, (document_id,)).fetchall():
        scrub(connection, row["job_id"], now, error=error)
