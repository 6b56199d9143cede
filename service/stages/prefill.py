"""Prefills under way in this worker. One run makes the KV of one prefix, however many jobs wait for it.

A prefill job and the answers that found no KV join the same run; it ends early when the last of them has left.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from engine.interfaces import Fidelity, Prefill, PrefillRequest, PrefillResult
from service.admission import Admission
from service.kv_policy import apply_kv_policy, kv_policy
from service.payloads import PrefillPayload
from service.queue.base import Effects, Job, LeaseLost, QueueUnavailable, RecordChange
from service.stages.context import StageContext

log = logging.getLogger(__name__)

PROGRESS_S = 0.5  # least time between two progress events of a job


class Waiter(Protocol):
    """A job that waits for a run. Called between steps, in the scheduler's thread."""

    job: Job

    def prefill_progress(self, fraction: float, eta_s: float | None) -> None: ...

    def failed(self, code: str) -> None:
        """This attempt is over."""
        ...


@dataclass
class PrefillRun:
    """`request.holder` names it."""

    request: PrefillRequest
    waiters: list[Waiter] = field(default_factory=list)
    prefill: Prefill | None = None
    kv_waited_s: float = 0.0  # of its time so far: the KV store's share

    @property
    def interactive(self) -> bool:
        return any(waiter.job.kind == "answer" for waiter in self.waiters)

    @property
    def num_tokens(self) -> int:
        return len(self.request.tokens)

    @property
    def left(self) -> float:
        """Tokens of work left, for picking the shorter one."""
        done = self.prefill.progress if self.prefill is not None else 0.0
        return self.num_tokens * (1.0 - done)

    def step(self, start: Callable[[PrefillRequest], Prefill]) -> bool:
        """One bounded step; True while there is more. Raises what the engine raises."""
        if self.prefill is None:
            self.prefill = start(self.request)
            return True
        more = self.prefill.step()
        for waiter in self.waiters:
            waiter.prefill_progress(self.prefill.progress, self.prefill.eta_s)
        return more

    def suspend(self) -> None:
        if self.prefill is not None:
            self.prefill.suspend()

    def cancel(self) -> None:
        if self.prefill is not None:
            self.prefill.cancel()


class PrefillRuns:
    """All runs, oldest first."""

    MAX_STARTED = 4
    FAIR_TURN = 4  # each so-many-th step goes to the oldest run, so that short ones can't starve it

    def __init__(self, admission: Admission) -> None:
        self.runs: dict[str, PrefillRun] = {}
        self._admission = admission
        self._turn = 0

    def join(self, request: PrefillRequest, waiter: Waiter) -> None:
        run = self.runs.setdefault(request.holder, PrefillRun(request))
        run.waiters.append(waiter)

    def leave(self, waiter: Waiter) -> None:
        """A waiter's job was lost or cancelled. Its run goes on if another waits for it."""
        for holder, run in list(self.runs.items()):
            if waiter in run.waiters:
                run.waiters.remove(waiter)
                if not run.waiters:
                    run.cancel()
                    del self.runs[holder]

    def next(self) -> PrefillRun | None:
        """Interactive ones first, then the one with least left; the oldest has its turn now and then."""
        open_runs = self._open_runs()
        if not open_runs:
            return None
        self._turn += 1
        if self._turn % self.FAIR_TURN == 0:
            return open_runs[0]
        return min(open_runs, key=_urgency)

    def _open_runs(self) -> list[PrefillRun]:
        """Those under way, and those that may begin beside them."""
        started = [run for run in self.runs.values() if run.prefill is not None]
        if len(started) >= self.MAX_STARTED:
            return started
        if not started:
            self._admission.measure()
            return sorted(self.runs.values(), key=_urgency)[:1]
        open_runs, sizes, older = list[PrefillRun](), [run.num_tokens for run in started], list[int]()
        held_up = False  # one waits for memory that only younger ones have: no more of them begin
        for run in self.runs.values():
            if run.prefill is not None:
                older.append(run.num_tokens)
                open_runs.append(run)
            elif not held_up and self._admission.fits(run.num_tokens, sizes):
                open_runs.append(run)
            else:
                held_up = held_up or self._admission.fits(run.num_tokens, older)
        return open_runs

    def least_left(self, jobs: Collection[Waiter]) -> float:
        """Tokens of work left in the shortest run that one of these waits for; infinite without any."""
        waited = (run for run in self.runs.values() if any(waiter in jobs for waiter in run.waiters))
        return min((run.left for run in waited), default=math.inf)

    def end(self, run: PrefillRun) -> list[Waiter]:
        """The run is over; returns who waited for it."""
        del self.runs[run.request.holder]
        return run.waiters

    def suspend(self) -> None:
        for run in self.runs.values():
            run.suspend()
        self.runs.clear()


def _urgency(run: PrefillRun) -> tuple[bool, float]:
    return (not run.interactive, run.left)


class PrefillJob:
    """A claimed job of kind `prefill`."""

    def __init__(self, context: StageContext, job: Job) -> None:
        self.job = job
        self._context = context
        self._payload: PrefillPayload = job.payload  # type: ignore[assignment]
        self._reported_at = 0.0
        self._started_at = context.clock()

    def request(self) -> PrefillRequest:
        """Raises UnknownRecord, OSError, ValueError."""
        context, payload = self._context, self._payload
        fidelity: Fidelity = payload["fidelity"]  # type: ignore[assignment]
        policy = kv_policy(context.documents, payload["document_id"], fidelity)
        return PrefillRequest(
            tokens=context.prefix(self.job.tenant, [payload["document_id"]]),
            salt=context.salt(self.job.tenant),
            owner=self.job.id,
            holder=prefill_id(payload["document_id"], fidelity),
            fidelity=fidelity,
            kv_ttl_s=policy.ttl_s,
            pinned=policy.pinned,
        )

    def prefill_progress(self, fraction: float, eta_s: float | None) -> None:
        self._reported_at = report_progress(self._context, self.job, self._reported_at, fraction, eta_s)

    def failed(self, code: str) -> None:
        context = self._context
        context.traces.stage(
            "prefill", self._payload.get("traceparent"), self._started_at, context.clock(), self._named(), error=code
        )

    def _named(self) -> dict[str, Any]:
        return {
            "foreword.document.id": self._payload.get("document_id"),
            "foreword.fidelity": self._payload.get("fidelity"),
        }

    def finish(self, request: PrefillRequest, result: PrefillResult, kv_waited_s: float) -> None:
        """`kv_waited_s`: how much of the prefill was waiting for the KV store. Raises LeaseLost."""
        context, ended_at = self._context, self._context.clock()
        ttft_s = max(0.0, ended_at - self._payload["uploaded_at"])
        fields = prefill_fields(context, request, result) | {"cold_ttft_s": ttft_s}
        effects = Effects([RecordChange("prefills", request.holder, fields)])
        context.queue.finish(self.job, {"num_tokens": result.num_tokens, "seconds": result.seconds}, effects)
        state = "partial" if result.cached_tokens else "cold"
        ingest_s, prefill_s = self._payload.get("ingest_seconds", 0.0), max(0.0, ended_at - self._started_at)
        stages = {
            "ingest": ingest_s,
            "queue": ttft_s - ingest_s - prefill_s,  # for both jobs
            "prefill": prefill_s - kv_waited_s,
            "kv_store": kv_waited_s,
        }
        context.metrics.first_token(context.model_id, state, ttft_s, stages)
        trace_prefill(context, self.job, self._started_at, ended_at, result, kv_waited_s, self._named())
        # A handle may have come, or its policy changed, while this ran.
        apply_kv_policy(context.documents, context.kv, self._payload["document_id"], self._payload["fidelity"])


def trace_prefill(
    context: StageContext,
    job: Job,
    start_s: float,
    end_s: float,
    result: PrefillResult,
    kv_waited_s: float,
    attributes: Mapping[str, Any],
) -> None:
    """Its span, and one as long as it waited for the KV store, which it did here and there."""
    traceparent = job.payload.get("traceparent")
    figures = {
        "gen_ai.operation.name": "prefill",
        "gen_ai.usage.input_tokens": result.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": result.cached_tokens,
        "foreword.density": result.density,
        "foreword.recall": None if result.recall is None else result.recall.mean,
    }
    context.traces.stage("prefill", traceparent, start_s, end_s, {**attributes, **figures})
    context.traces.stage("kv_store", traceparent, end_s - kv_waited_s, end_s, {"foreword.kv.operation": "write"})


def prefill_id(document_id: str, fidelity: str) -> str:
    return f"{document_id}:{fidelity}"


def prefill_fields(context: StageContext, request: PrefillRequest, result: PrefillResult) -> dict[str, Any]:
    """What a prefill's record says when its KV is made."""
    return {
        "state": "ready",
        "num_tokens": result.num_tokens,
        "digest": context.engine.digest(request.fidelity),
        "density": result.density,
        "recall": None if result.recall is None else asdict(result.recall),
        "heads": dict(result.heads),
        "cached_tokens": result.cached_tokens,
        "layers_recomputed": result.layers_recomputed,
        "seconds": result.seconds,
        "error": None,
        "segments": [asdict(segment) for segment in result.segment_recalls],
        "head_map": list(result.head_map),
    }


def report_progress(context: StageContext, job: Job, reported_at: float, fraction: float, eta_s: float | None) -> float:
    """At most one event in PROGRESS_S. Returns when the last one was."""
    now = context.clock()
    if 0 <= now - reported_at < PROGRESS_S and fraction < 1.0:
        return reported_at
    try:
        context.queue.progress(job, fraction, {"stage": "prefill", "eta_s": eta_s})
    except (LeaseLost, QueueUnavailable) as error:
        # Others may wait for the same run; the scheduler finds out about this job by itself.
        log.info("progress of job %s not reported: %s", job.id, error)
    return now
