"""The queue's contract: at-least-once delivery with fencing. Every backend passes tests/contracts/queue_contract.py."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

JobKind = Literal["ingest", "prefill", "answer"]
JOB_KINDS: tuple[JobKind, ...] = ("ingest", "prefill", "answer")
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled", "dead"]
FINAL_STATES: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled", "dead"})
Json = Mapping[str, Any]


AGEING_S = 30.0  # so long a wait is worth one step of priority


def retry_delay_s(attempts: int) -> float:
    """How long a job rests that has failed so many times: 0.5 s, 2 s, 8 s, …, at most a minute."""
    return float(min(0.5 * 4 ** (attempts - 1), 60.0))


class QueueError(Exception):
    """Base of the queue's errors."""


class LeaseLost(QueueError):
    """The attempt's epoch is no longer the job's: another attempt owns it, or it was cancelled. Nothing was written."""


class QueueUnavailable(QueueError):
    """The queue's store can't do it now (unreachable, locked for too long, full). Nothing was written."""


class UnknownJob(QueueError):
    """No job has this id."""


class NotRequeued(QueueError):
    """Only a job that failed or is dead can be queued again, and only while no other does the same work."""


@dataclass(frozen=True)
class NewJob:
    kind: JobKind
    tenant: str
    payload: Json
    priority: int = 0  # higher goes first among the jobs of one tenant; answers are interactive and use 10
    cost_tokens: int = 0  # what fairness weighs
    job_id: str | None = None  # given: put is idempotent (the same id again changes nothing)
    max_attempts: int = 3
    single_flight: str | None = None  # at most one unfinished job per value; put returns the existing one
    affinity: str | None = None  # holder of the KV that it needs: workers without that wait a little
    reader: str | None = None  # only for whoever reads it through this API process (see `attend`)


@dataclass(frozen=True)
class Job:
    id: str
    kind: JobKind
    tenant: str
    payload: Json
    priority: int
    state: JobState
    attempts: int
    epoch: int  # raised by each claim, cancel and requeue
    progress: float
    detail: Json  # free fields shown to users: stage, eta_s, …
    result: Json | None
    error: Json | None  # {"code", "message"}
    created_at: float  # unix seconds
    started_at: float | None
    finished_at: float | None
    cancel_requested: bool
    worker: str | None = None  # who runs it now


@dataclass(frozen=True)
class Lane:
    """The unfinished jobs of one kind and tenant."""

    kind: JobKind
    tenant: str
    queued: int
    running: int
    oldest_queued_age_s: float


@dataclass(frozen=True)
class Event:
    """One entry of a job's event log. `seq` counts from 1 without gaps.

    state: {"state", "attempt"} at each change · progress: {"progress", …detail} · token: {"text"} ·
    done: {"state", "error"}, always the last.
    """

    seq: int
    type: str  # state | progress | token | done
    data: Json


@dataclass(frozen=True)
class RecordChange:
    """Fields to set on one record (made if it isn't there), in the same transaction that ends or advances a job."""

    table: Literal["files", "documents", "prefills"]
    id: str
    fields: Json


@dataclass(frozen=True)
class Effects:
    """What ends with a job, all or nothing: changes of records and follow-up jobs."""

    changes: Sequence[RecordChange] = ()
    put: Sequence[NewJob] = field(default_factory=list)


NO_EFFECTS = Effects()
SCRUBBED: Json = {"scrubbed": True}


class Queue(Protocol):
    def put(self, job: NewJob, effects: Effects = NO_EFFECTS) -> Job:
        """Durable when it returns. Where `single_flight` gives an existing job, `effects` are applied all the same."""
        ...

    def wait(self, timeout_s: float, kinds: Iterable[JobKind] = JOB_KINDS) -> None:
        """Sleep until a job of these kinds may be waiting, at most `timeout_s`."""
        ...

    def claim(
        self,
        worker: str,
        kinds: Iterable[JobKind],
        *,
        lease_s: float,
        below: int | None = None,
        without: Collection[str] = (),
    ) -> Job | None:
        """Take the next job; raises its epoch and attempts.

        Tenants have their turns by deficit round-robin, weighted by tokens, whatever their priorities; of one tenant's
        jobs the highest priority goes first, where waiting AGEING_S is worth one step of it.

        `below`: one that costs fewer tokens than this, whatever stands before it in its line. `without`: of none of
        these tenants. Either has turns of its own.
        """
        ...

    def extend(self, job: Job, *, lease_s: float) -> None:
        """Renew the lease. Raises LeaseLost; also when a cancel was asked for."""
        ...

    def holds(self, job: Job) -> bool:
        """Whether this attempt still owns the job: cheap enough to ask between two steps."""
        ...

    def progress(self, job: Job, fraction: float, detail: Json | None = None) -> None:
        """Shown to users, and an event. Raises LeaseLost."""
        ...

    def emit(self, job: Job, events: Sequence[tuple[str, Json]]) -> None:
        """Append to the job's event log (tokens of an answer). Raises LeaseLost."""
        ...

    def finish(self, job: Job, result: Json, effects: Effects = NO_EFFECTS) -> None:
        """Succeed, once: epoch checked in the same transaction as `effects`. Raises LeaseLost."""
        ...

    def fail(self, job: Job, error: Json, *, retry: bool, effects: Effects = NO_EFFECTS) -> Job:
        """With `retry`: queued again, to be claimed after a while (retry_delay_s), or dead when attempts are used up.

        `effects` are applied only when final. Raises LeaseLost.
        """
        ...

    def release(self, job: Job) -> None:
        """Hand the lease back without counting the attempt (graceful drain)."""
        ...

    def cancel(self, job_id: str) -> Job:
        """A queued job ends at once; a running one loses its epoch, its worker notices at the next step.

        Either is `cancelled` when this returns. Raises UnknownJob.
        """
        ...

    def reclaim(self) -> int:
        """Requeue (or dead-letter) jobs whose lease ended; called on a timer. Returns how many.

        Unfinished jobs that only readers wanted who are gone are cancelled.
        """
        ...

    def attend(self, reader: str, *, for_s: float) -> None:
        """This reader lives, and says so again within `for_s`: a job put for it alone is in vain once it doesn't."""
        ...

    def get(self, job_id: str) -> Job:
        """Raises UnknownJob."""
        ...

    def known(self, job_ids: Collection[str]) -> Mapping[str, Job]:
        """Those of them that are there, by one question to the store."""
        ...

    def events(self, job_id: str, after_seq: int = 0, *, timeout_s: float = 0.0) -> list[Event]:
        """Events behind `after_seq`; waits up to `timeout_s` for the first."""
        ...

    async def events_async(self, job_id: str, after_seq: int = 0, *, timeout_s: float = 0.0) -> list[Event]:
        """The same without a thread a waiter."""
        ...

    def prune(self, before: float) -> int:
        """Forget jobs that finished before this time, events included. Returns how many."""
        ...

    def counts(self) -> Mapping[JobState, int]: ...

    def oldest_queued_age_s(self) -> float: ...

    def lanes(self) -> Sequence[Lane]:
        """Who waits for what; only lanes that have unfinished jobs."""
        ...

    def jobs(self, state: JobState, *, limit: int) -> Sequence[Job]:
        """Newest first: by their end, or by their creation where they haven't ended."""
        ...

    def requeue(self, job_id: str) -> Job:
        """A failed or dead job begins anew, its attempts uncounted; its records wait for it again, files included.

        Raises UnknownJob, NotRequeued.
        """
        ...

    def scrub(self, job_id: str) -> None:
        """Forget what a job was asked and what it said: payload and result become SCRUBBED, tokens lose their text.

        An unfinished job is cancelled first. Nothing happens where the job is gone.
        """
        ...

    def close(self) -> None: ...
