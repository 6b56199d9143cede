"""The queue of one machine: jobs and their events in SQLite, wake-ups over Unix sockets."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from sqlite3 import Row

from service.database import Database, rows_of
from service.queue import sqlite_jobs as jobs
from service.queue.base import (
    FINAL_STATES,
    JOB_KINDS,
    NO_EFFECTS,
    Effects,
    Event,
    Job,
    JobKind,
    JobState,
    Json,
    Lane,
    NewJob,
    UnknownJob,
    retry_delay_s,
)
from service.queue.following import next_events, next_events_async
from service.queue.machine_clock import uptime_s
from service.queue.waiters import Waiters
from service.queue.wakeup import Announcer, Listener, socket_folder

JOBS, EVENTS = "jobs", "events"  # topics of wake-ups
ANY_JOB = "any"


class SqliteQueue:
    """Implements service.queue.base.Queue. Thread-safe; any number of processes may open the same database."""

    def __init__(
        self,
        database: Database,
        *,
        clock: Callable[[], float] = time.time,
        uptime: Callable[[], float] = uptime_s,
    ) -> None:
        """`clock` gives unix seconds, for records and ageing; leases and rests go by `uptime`, which nobody can set.

        Affinity says nothing here: all workers of a machine share its KV. The database stays the caller's to close.
        """
        self._database = database
        self._clock = clock
        self._uptime = uptime
        self._folder = socket_folder(database.path.parent)
        self._announcer = Announcer(self._folder)
        self._listeners: dict[str, Listener] = {}
        self._listeners_lock = threading.Lock()
        self._newest_event = 0

    def put(self, job: NewJob, effects: Effects = NO_EFFECTS) -> Job:
        with self._database.write(durable=True) as connection:
            stored, added = jobs.put(connection, job, effects, self._clock())
        self._announce_jobs(added)
        return stored

    def wait(self, timeout_s: float, kinds: Iterable[JobKind] = JOB_KINDS) -> None:
        wanted, deadline = tuple(kinds), time.monotonic() + timeout_s
        with self._listener(JOBS).waiters.watch(ANY_JOB) as news:
            while (left_s := deadline - time.monotonic()) > 0:
                with self._database.read() as connection:
                    if jobs.has_queued(connection, wanted, self._uptime()):
                        return
                news.wait(left_s)
                news.clear()

    def claim(
        self,
        worker: str,
        kinds: Iterable[JobKind],
        *,
        lease_s: float,
        below: int | None = None,
        without: Collection[str] = (),
    ) -> Job | None:
        wanted = tuple(kinds)
        with self._database.read() as connection:
            if not jobs.has_queued(connection, wanted, self._uptime(), below):
                return None
            if without and not jobs.heads(connection, wanted, self._uptime(), below, without):
                return None
        now = self._clock()
        with self._database.write(durable=False) as connection:
            job_id = jobs.pick(connection, wanted, self._uptime(), below, without)
            if job_id is None:
                return None
            job = jobs.start(connection, job_id, worker, self._uptime() + lease_s, now)
        self._announcer.announce(EVENTS, job.id)
        return job

    def extend(self, job: Job, *, lease_s: float) -> None:
        with self._database.write(durable=False) as connection:
            jobs.fetch_held(connection, job)
            connection.execute("UPDATE jobs SET lease_until = ? WHERE id = ?", (self._uptime() + lease_s, job.id))

    def holds(self, job: Job) -> bool:
        query = "SELECT 1 FROM jobs WHERE id = ? AND state = 'running' AND epoch = ?"
        with self._database.read() as connection:
            return connection.execute(query, (job.id, job.epoch)).fetchone() is not None

    def progress(self, job: Job, fraction: float, detail: Json | None = None) -> None:
        data = {"progress": fraction, **(detail or {})}
        with self._database.write(durable=False) as connection:
            jobs.fetch_held(connection, job)
            connection.execute(
                "UPDATE jobs SET progress = ?, detail = ? WHERE id = ?", (fraction, jobs.encode(detail or {}), job.id)
            )
            jobs.append_events(connection, job.id, [("progress", data)])
        self._announcer.announce(EVENTS, job.id)

    def emit(self, job: Job, events: Sequence[tuple[str, Json]]) -> None:
        with self._database.write(durable=False) as connection:
            jobs.fetch_held(connection, job)
            jobs.append_events(connection, job.id, events)
        self._announcer.announce(EVENTS, job.id)

    def finish(self, job: Job, result: Json, effects: Effects = NO_EFFECTS) -> None:
        now = self._clock()
        with self._database.write(durable=True) as connection:
            jobs.fetch_held(connection, job)
            jobs.end(connection, job.id, "succeeded", now, result=result)
            added = jobs.apply_effects(connection, effects, now)
        self._announcer.announce(EVENTS, job.id)
        self._announce_jobs(added)

    def fail(self, job: Job, error: Json, *, retry: bool, effects: Effects = NO_EFFECTS) -> Job:
        now = self._clock()
        added: list[str] = []
        with self._database.write(durable=True) as connection:
            row = jobs.fetch_held(connection, job)
            if retry and row["attempts"] < row["max_attempts"]:
                rested_at = self._uptime() + retry_delay_s(row["attempts"])
                jobs.requeue(connection, row, jobs.encode(error), not_before=rested_at)
            else:
                jobs.end(connection, job.id, "dead" if retry else "failed", now, error=error)
                added = jobs.apply_effects(connection, effects, now)
            ended = jobs.decode(jobs.fetch(connection, job.id))
        self._announcer.announce(EVENTS, job.id)
        self._announce_jobs(added)
        return ended

    def release(self, job: Job) -> None:
        with self._database.write(durable=False) as connection:
            jobs.requeue(connection, jobs.fetch_held(connection, job), None, count_attempt=False)
        self._announce_jobs([job.id])

    def cancel(self, job_id: str) -> Job:
        with self._database.write(durable=True) as connection:
            changed = jobs.cancel(connection, job_id, self._clock())
            job = jobs.decode(jobs.fetch(connection, job_id))
        if changed:
            self._announcer.announce(EVENTS, job_id)
        return job

    def reclaim(self) -> int:
        now, uptime = self._clock(), self._uptime()
        with self._database.read() as connection:
            if not jobs.expired(connection, uptime) and not jobs.any_reader_gone(connection, uptime):
                return 0
        with self._database.write(durable=True) as connection:
            expired = jobs.expired(connection, uptime)
            for row in expired:
                if row["attempts"] < row["max_attempts"]:
                    jobs.requeue(connection, row, None)
                else:
                    jobs.end(connection, row["id"], "dead", now, error=_died(row))
            unread = jobs.cancel_unread(connection, now, uptime)
        self._announce_jobs([row["id"] for row in expired])
        for job_id in unread:
            self._announcer.announce(EVENTS, job_id)
        return len(expired)

    def attend(self, reader: str, *, for_s: float) -> None:
        with self._database.write(durable=False) as connection:
            jobs.attend(connection, reader, self._uptime() + for_s)

    def get(self, job_id: str) -> Job:
        with self._database.read() as connection:
            return jobs.decode(jobs.fetch(connection, job_id))

    def known(self, job_ids: Collection[str]) -> Mapping[str, Job]:
        with self._database.read() as connection:
            return {row["id"]: jobs.decode(row) for row in rows_of(connection, "jobs", job_ids)}

    def events(self, job_id: str, after_seq: int = 0, *, timeout_s: float = 0.0) -> list[Event]:
        return next_events(lambda: self._read_events(job_id, after_seq), self._event_waiters, job_id, timeout_s)

    async def events_async(self, job_id: str, after_seq: int = 0, *, timeout_s: float = 0.0) -> list[Event]:
        return await next_events_async(
            lambda: self._read_events(job_id, after_seq), self._event_waiters, job_id, timeout_s
        )

    def _event_waiters(self) -> Waiters:
        return self._listener(EVENTS).waiters

    def _read_events(self, job_id: str, after_seq: int) -> tuple[list[Event], bool]:
        """(events behind `after_seq`, whether more may come). Raises UnknownJob."""
        with self._database.read() as connection:
            state = connection.execute("SELECT state FROM jobs WHERE id = ?", (job_id,)).fetchone()
            if state is None:
                raise UnknownJob(f"no job {job_id!r}")
            rows = connection.execute(
                "SELECT seq, type, data FROM events WHERE job_id = ? AND seq > ? ORDER BY seq", (job_id, after_seq)
            ).fetchall()
        # The state is read first: a job that had ended by then has all its events.
        return [jobs.decode_event(row) for row in rows], state["state"] not in FINAL_STATES

    def _missed_events(self) -> list[str]:
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT id, job_id FROM events WHERE id > ? ORDER BY id", (self._newest_event,)
            ).fetchall()
        if rows:
            self._newest_event = rows[-1]["id"]
        return list({row["job_id"] for row in rows})

    def prune(self, before: float) -> int:
        with self._database.write(durable=False) as connection:
            return connection.execute("DELETE FROM jobs WHERE finished_at < ?", (before,)).rowcount

    def counts(self) -> Mapping[JobState, int]:
        with self._database.read() as connection:
            rows = connection.execute("SELECT state, count(*) AS number FROM jobs GROUP BY state").fetchall()
        return {row["state"]: row["number"] for row in rows}

    def oldest_queued_age_s(self) -> float:
        with self._database.read() as connection:
            (oldest,) = connection.execute("SELECT min(created_at) FROM jobs WHERE state = 'queued'").fetchone()
        return 0.0 if oldest is None else max(0.0, self._clock() - oldest)

    def lanes(self) -> Sequence[Lane]:
        query = (
            "SELECT kind, tenant, sum(state = 'queued') AS queued, sum(state = 'running') AS running, "
            "min(CASE state WHEN 'queued' THEN created_at END) AS oldest FROM jobs "
            "WHERE state IN ('queued', 'running') GROUP BY kind, tenant ORDER BY kind, tenant"
        )
        with self._database.read() as connection:
            rows = connection.execute(query).fetchall()
        now = self._clock()

        def age_s(row: Row) -> float:
            return 0.0 if row["oldest"] is None else max(0.0, now - row["oldest"])

        return [Lane(row["kind"], row["tenant"], row["queued"], row["running"], age_s(row)) for row in rows]

    def jobs(self, state: JobState, *, limit: int) -> Sequence[Job]:
        query = "SELECT * FROM jobs WHERE state = ? ORDER BY coalesce(finished_at, created_at) DESC, id LIMIT ?"
        with self._database.read() as connection:
            return [jobs.decode(row) for row in connection.execute(query, (state, limit))]

    def requeue(self, job_id: str) -> Job:
        with self._database.write(durable=True) as connection:
            jobs.begin_anew(connection, job_id)
            job = jobs.decode(jobs.fetch(connection, job_id))
        self._announce_jobs([job_id])
        return job

    def scrub(self, job_id: str) -> None:
        try:
            with self._database.write(durable=True) as connection:
                jobs.scrub(connection, job_id, self._clock())
        except UnknownJob:
            return
        self._announcer.announce(EVENTS, job_id)

    def close(self) -> None:
        with self._listeners_lock:
            for listener in self._listeners.values():
                listener.close()
            self._listeners.clear()
        self._announcer.close()

    def _announce_jobs(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self._announcer.announce(EVENTS, job_id)
        if job_ids:
            self._announcer.announce(JOBS, ANY_JOB)

    def _listener(self, topic: str) -> Listener:
        with self._listeners_lock:
            if topic not in self._listeners:
                if topic == EVENTS:
                    with self._database.read() as connection:
                        (newest,) = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
                    self._newest_event = newest
                missed = self._missed_events if topic == EVENTS else lambda: [ANY_JOB]
                self._listeners[topic] = Listener(self._folder, topic, missed)
            return self._listeners[topic]


def _died(row: Row) -> Json:
    reason = f"its worker died or fell silent in each of {row['attempts']} attempts"
    if row["error"] is not None:
        reason = f"{reason}; an earlier one ended with: {jobs.message(row['error'])}"
    return {"code": "worker_lost", "message": reason}
