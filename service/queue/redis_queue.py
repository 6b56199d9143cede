"""The queue of several machines: jobs and their events in Redis. Every transition is a script in `lua/`."""

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

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
    LeaseLost,
    NewJob,
    NotRequeued,
    QueueUnavailable,
    UnknownJob,
    retry_delay_s,
)
from service.queue.following import next_events, next_events_async
from service.queue.redis_jobs import decode_event, decode_job, encode_effects, encode_events, encode_job
from service.queue.redis_news import RedisNews
from service.queue.redis_store import RedisStore, dumps, fields_of
from service.queue.waiters import Waiters

PRUNE_STEP = 500  # jobs that one script forgets: no script may hold up the others for long
IDLE_CONSUMER_MS = 3_600_000
AWAY_S = 60.0  # readers of events wait so long for a Redis that is away: there is no news, not an error
AGAIN_S = 0.5
GROUP = "workers"


class RedisQueue:
    """Implements service.queue.base.Queue. Thread-safe; any number of processes and machines."""

    def __init__(
        self,
        store: RedisStore,
        *,
        site: str = "",
        kv_bytes: Callable[[str], Mapping[str, int]] | None = None,
    ) -> None:
        """`site` names the KV folder of the worker that claims, `kv_bytes` says what it keeps there for a holder.

        The store stays the caller's to close.
        """
        self._store = store
        self._site = site
        self._kv_bytes = kv_bytes
        self._news: RedisNews | None = None
        self._news_lock = threading.Lock()

    def put(self, job: NewJob, effects: Effects = NO_EFFECTS) -> Job:
        _, job_id = self._store.run_once("put", dumps(encode_job(job)), encode_effects(effects))
        return self.get(job_id.decode())

    def wait(self, timeout_s: float, kinds: Iterable[JobKind] = JOB_KINDS) -> None:
        wanted, deadline = sorted(kinds), time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            found, pause, ends = self._store.run("waiting", self._site, dumps(wanted))
            if found:
                return
            if 0 <= float(pause) < left_s:  # until then nothing that was put can be had
                left_s = float(pause) + 0.001
            streams = {self._store.key("queue", kind): end.decode() for kind, end in zip(wanted, ends, strict=True)}
            self._store.read_behind(streams, left_s, count=1)

    def claim(
        self,
        worker: str,
        kinds: Iterable[JobKind],
        *,
        lease_s: float,
        below: int | None = None,
        without: Collection[str] = (),
    ) -> Job | None:
        limit, others = "" if below is None else below, dumps(dict.fromkeys(without, 1))
        flat = self._store.run_once("claim", worker, lease_s, self._site, dumps(sorted(kinds)), limit, others)
        return decode_job(fields_of(flat)) if flat else None

    def extend(self, job: Job, *, lease_s: float) -> None:
        _held(job, self._store.run("extend", job.id, job.epoch, lease_s))

    def holds(self, job: Job) -> bool:
        name = self._store.key("job", job.id)
        state, epoch = self._store.command("hmget", name, "state", "epoch")
        return bool(state == b"running" and int(epoch) == job.epoch)

    def progress(self, job: Job, fraction: float, detail: Json | None = None) -> None:
        fields = {"progress": repr(float(fraction)), "detail": dumps(detail or {})}
        self._emit(job, [("progress", {"progress": fraction, **(detail or {})})], fields)

    def emit(self, job: Job, events: Sequence[tuple[str, Json]]) -> None:
        self._emit(job, events, {})

    def _emit(self, job: Job, events: Sequence[tuple[str, Json]], fields: Mapping[str, str]) -> None:
        reply = self._store.run_once("emit", job.id, job.epoch, encode_events(events), dumps(fields))
        _held(job, reply)

    def finish(self, job: Job, result: Json, effects: Effects = NO_EFFECTS) -> None:
        made = {change.id: dumps(self._kv_at(change.id)) for change in effects.changes if change.table == "prefills"}
        kept = {holder: sizes for holder, sizes in made.items() if sizes != "{}"}
        arguments = (job.id, job.epoch, dumps(result), encode_effects(effects), dumps(kept))
        _held(job, self._store.run_once("finish", *arguments))

    def _kv_at(self, holder: str) -> Mapping[str, int]:
        return {} if self._kv_bytes is None else self._kv_bytes(holder)

    def fail(self, job: Job, error: Json, *, retry: bool, effects: Effects = NO_EFFECTS) -> Job:
        rest_s = retry_delay_s(job.attempts)
        arguments = (job.id, job.epoch, dumps(error), int(retry), rest_s, encode_effects(effects))
        _held(job, self._store.run_once("fail", *arguments))
        return self.get(job.id)

    def release(self, job: Job) -> None:
        _held(job, self._store.run_once("release", job.id, job.epoch))

    def cancel(self, job_id: str) -> Job:
        _known(job_id, self._store.run("cancel", job_id))
        return self.get(job_id)

    def reclaim(self) -> int:
        return int(self._store.run("reclaim"))

    def attend(self, reader: str, *, for_s: float) -> None:
        self._store.run("attend", reader, for_s)

    def get(self, job_id: str) -> Job:
        return self._jobs([job_id])[0]

    def known(self, job_ids: Collection[str]) -> Mapping[str, Job]:
        return {job.id: job for job in self._known_jobs(list(job_ids))}

    def events(self, job_id: str, after_seq: int = 0, *, timeout_s: float = 0.0) -> list[Event]:
        try:
            return next_events(lambda: self._read_events(job_id, after_seq), self._waiters, job_id, timeout_s)
        except QueueUnavailable:
            if timeout_s <= 0 or self._store.away_s > AWAY_S:
                raise
            time.sleep(min(AGAIN_S, timeout_s))
            return []

    async def events_async(self, job_id: str, after_seq: int = 0, *, timeout_s: float = 0.0) -> list[Event]:
        try:
            return await next_events_async(
                lambda: self._read_events(job_id, after_seq), self._waiters, job_id, timeout_s
            )
        except QueueUnavailable:
            if timeout_s <= 0 or self._store.away_s > AWAY_S:
                raise
            await asyncio.sleep(min(AGAIN_S, timeout_s))
            return []

    def _read_events(self, job_id: str, after_seq: int) -> tuple[list[Event], bool]:
        """(events behind `after_seq`, whether more may come). Raises UnknownJob."""

        def read(client: Any) -> Any:
            with client.pipeline(transaction=True) as pipe:
                pipe.hmget(self._store.key("job", job_id), "state", "last_seq", "error")
                pipe.xrange(self._store.key("events", job_id), min=f"{after_seq + 1}-0")
                return pipe.execute()

        (state, last_seq, error), entries = self._store.ask(read)
        if state is None:
            raise UnknownJob(f"no job {job_id!r}")
        events, ended = [decode_event(entry) for entry in entries], state.decode() in FINAL_STATES
        if ended and not events and after_seq < int(last_seq):  # the log has expired: how it ended is known still
            failure = None if error is None else error.decode()
            data = f'{{"state":"{state.decode()}","error":{failure or "null"}}}'.encode()
            events = [decode_event((last_seq + b"-0", {b"t": b"done", b"d": data}))]
        return events, not ended

    def _waiters(self) -> Waiters:
        with self._news_lock:
            if self._news is None:
                self._news = RedisNews(self._store)
            return self._news.waiters

    def prune(self, before: float) -> int:
        forgotten = 0
        while (step := int(self._store.run("prune", before, PRUNE_STEP))) > 0:
            forgotten += step
        self._forget_consumers()
        return forgotten

    def _forget_consumers(self) -> None:
        """Workers that are gone leave their names in the groups."""
        for kind in JOB_KINDS:
            stream = self._store.key("queue", kind)
            if not self._store.command("exists", stream):
                continue
            for consumer in self._store.command("xinfo_consumers", stream, GROUP):
                if consumer["pending"] == 0 and consumer["idle"] > IDLE_CONSUMER_MS:
                    self._store.command("xgroup_delconsumer", stream, GROUP, consumer["name"])

    def counts(self) -> Mapping[JobState, int]:
        found = self._store.command("hgetall", self._store.key("counts"))
        return {state: int(number) for state, number in fields_of(found).items() if int(number)}  # type: ignore[misc]

    def oldest_queued_age_s(self) -> float:
        return max((lane.oldest_queued_age_s for lane in self.lanes()), default=0.0)

    def lanes(self) -> Sequence[Lane]:
        running = fields_of(self._store.command("hgetall", self._store.key("running")))
        names = {tuple(name.split(":", 1)) for name in running} | set(self._waiting_lanes())
        now = self._store.now()
        found = []
        for kind, tenant in sorted(names):
            name = self._store.key("queued", kind, tenant)
            oldest = self._store.command("zrange", name, 0, 0, withscores=True)
            queued = self._store.command("zcard", name)
            age_s = max(0.0, now - oldest[0][1]) if oldest else 0.0
            found.append(Lane(kind, tenant, queued, int(running.get(f"{kind}:{tenant}", 0)), age_s))  # type: ignore[arg-type]
        return [lane for lane in found if lane.queued or lane.running]

    def jobs(self, state: JobState, *, limit: int) -> Sequence[Job]:
        if state in FINAL_STATES:
            ids = self._members("zrevrange", self._store.key("ended", state), 0, limit - 1)
            return self._known_jobs(ids)
        if state == "running":
            ids = self._members("zrange", self._store.key("leases"), 0, -1)
        else:
            lanes = [self._store.key("queued", kind, tenant) for kind, tenant in self._waiting_lanes()]
            ids = [job_id for lane in lanes for job_id in self._members("zrevrange", lane, 0, limit - 1)]
        found = [job for job in self._known_jobs(ids) if job.state == state]
        return sorted(found, key=lambda job: (-job.created_at, job.id))[:limit]

    def requeue(self, job_id: str) -> Job:
        reply = _known(job_id, self._store.run_once("requeue", job_id))
        if reply[0] == b"refused":
            raise NotRequeued(reply[1].decode())
        return self.get(job_id)

    def scrub(self, job_id: str) -> None:
        self._store.run("scrub", job_id)

    def close(self) -> None:
        with self._news_lock:
            if self._news is not None:
                self._news.close()
                self._news = None

    def _waiting_lanes(self) -> list[tuple[JobKind, str]]:
        return [(kind, tenant) for kind in JOB_KINDS for tenant in self._members("zrange", self._tenants(kind), 0, -1)]

    def _tenants(self, kind: JobKind) -> str:
        return self._store.key("tenants", kind)

    def _members(self, command: str, name: str, first: int, last: int) -> list[str]:
        found = self._store.command(command, name, first, last)
        return [member.decode() for member in found]

    def _known_jobs(self, job_ids: Sequence[str]) -> list[Job]:
        """Without those that were forgotten meanwhile."""
        return [decode_job(fields) for fields in self._read_jobs(job_ids) if fields]

    def _jobs(self, job_ids: Sequence[str]) -> list[Job]:
        """Raises UnknownJob."""
        found = self._read_jobs(job_ids)
        for job_id, fields in zip(job_ids, found, strict=True):
            if "id" not in fields:
                raise UnknownJob(f"no job {job_id!r}")
        return [decode_job(fields) for fields in found]

    def _read_jobs(self, job_ids: Sequence[str]) -> list[dict[str, str]]:
        def read(client: Any) -> Any:
            with client.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.hgetall(self._store.key("job", job_id))
                return pipe.execute()

        return [fields_of(found) for found in self._store.ask(read)] if job_ids else []


def _held(job: Job, reply: Sequence[bytes]) -> None:
    """Raises LeaseLost."""
    if reply[0] == b"lost":
        state, epoch = reply[1].decode(), int(reply[2])
        raise LeaseLost(f"job {job.id}: epoch {job.epoch} no longer holds it ({state}, epoch {epoch})")


def _known(job_id: str, reply: Sequence[bytes]) -> Sequence[bytes]:
    """Raises UnknownJob."""
    if reply[0] == b"unknown":
        raise UnknownJob(f"no job {job_id!r}")
    return reply
