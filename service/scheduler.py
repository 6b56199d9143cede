"""Which job's next step the worker does: first tokens of new questions, then one token of each answer under way, then
one step of one prefill; and again.

A job is claimed when its turn has come and no earlier: what this worker can't do yet is for another that is idle, and
who is next is decided by who waits then.
"""

import logging
import threading
import time
from collections.abc import Collection

from engine.errors import RankLost
from engine.interfaces import PrefillRequest, PrefillResult
from service.queue.base import Job, JobKind, LeaseLost, QueueUnavailable
from service.stages.answer import AnswerJob
from service.stages.context import StageContext, logged
from service.stages.failures import failure_of
from service.stages.prefill import PrefillJob, PrefillRun, PrefillRuns, Waiter

log = logging.getLogger(__name__)

MAX_ANSWERS = 8  # that take turns, one token each
MAX_WITH_OTHERS = 16  # with one each of tenants that have none among them
MAX_WAITING = 32  # answers that wait for KV to be made
MAX_PREFILLS = 4  # jobs: a long one, and shorter ones that overtake it
OVERTAKING = 0.5  # of the work that the shortest has left: who overtakes it has less
QUESTIONS_S = 0.25  # new questions have their first tokens one after the other until so much time is used
IDLE_S = 0.5
COUNTED_S = 0.5  # computing is counted when there is so much of it, or nothing to do
PARKED_S = 0.02
UNAVAILABLE_S = 1.0


class EngineBroken(Exception):
    """The engine can do nothing more in this process: a new one must take over."""


class Scheduler:
    """Runs in the worker's main thread; the engine is touched from nowhere else."""

    def __init__(self, context: StageContext, worker: str) -> None:
        self._context = context
        self._worker = worker
        self._answers: dict[str, AnswerJob] = {}
        self._prefills: dict[str, PrefillJob] = {}
        self._runs = PrefillRuns(context.admission)
        self._ready: list[AnswerJob] = []  # their KV was made while others answered; first come, first served
        self._parked: Job | None = None
        self._stop = threading.Event()
        # A job that may have killed its workers runs by itself: no other is started, and no ingest beside it.
        self.alone = threading.Event()
        self.ingesting = threading.Event()  # set by the ingest loop
        self._computed_s = {"answer": 0.0, "prefill": 0.0}  # and not counted yet

    def stop(self) -> None:
        """Suspend and release everything at the next step; safe in a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Until `stop`. Raises EngineBroken."""
        try:
            while not self._stop.is_set():
                try:
                    self._round()
                except QueueUnavailable as error:  # a full disk, say: what runs goes on when there is room again
                    log.error("the job store is unavailable: %s", error)
                    self._stop.wait(UNAVAILABLE_S)
            self._runs.suspend()  # what prefills have computed is kept for whoever goes on
        finally:
            self._release()

    def _round(self) -> None:
        self._drop_lost()
        self._start_parked()
        self._step_answers()
        self._claim_prefill()
        if run := self._runs.next():
            self._step_prefill(run)
        elif not self._answers:
            self._idle()

    def _idle(self) -> None:
        self._count_work()
        if self._parked is not None:
            self._stop.wait(PARKED_S)
        else:
            self._context.queue.wait(IDLE_S, ("answer", "prefill"))

    # --- claiming ----------------------------------------------------------------------------------------------

    def _claim_prefill(self) -> None:
        """The next one where none is under way; beside others only one that will soon be through."""
        jobs = list(self._prefills.values())
        if not jobs:
            self._claim("prefill")
        elif len(jobs) < MAX_PREFILLS and (below := int(OVERTAKING * self._runs.least_left(jobs))) > 0:
            self._claim("prefill", below=below)

    def _claim_answer(self) -> bool:
        """False where no other can begin now. Answers that wait for a prefill keep none from answering.

        Nor do long answers of some tenants keep those of another from beginning.
        """
        answering = self._answering()
        count = answering + len(self._ready)
        if count >= MAX_WITH_OTHERS or len(self._answers) - answering >= MAX_WAITING:
            return False
        if count < MAX_ANSWERS:
            return self._claim("answer")
        return self._claim("answer", without=self._tenants_answering() | {answer.job.tenant for answer in self._ready})

    def _claim(self, kind: JobKind, *, below: int | None = None, without: Collection[str] = ()) -> bool:
        """Whether a job was begun."""
        if self._stop.is_set() or self._parked is not None or self.alone.is_set():
            return False
        settings = self._context.settings
        job = self._context.queue.claim(self._worker, [kind], lease_s=settings.lease_s, below=below, without=without)
        if job is None:
            return False
        self._context.leases.hold(job)
        self._context.claimed(job)
        if 1 < settings.max_attempts <= job.attempts:
            # Whatever ended the attempts before must not take others along: the last one runs by itself.
            self._parked = job
            return False
        self._start(job)
        return True

    def _answering(self) -> int:
        return sum(answer.answering for answer in self._answers.values())

    def _tenants_answering(self) -> set[str]:
        return {answer.job.tenant for answer in self._answers.values() if answer.answering}

    def _start_parked(self) -> None:
        """The parked job, as soon as nothing else runs here; others behind it when it has ended."""
        if self._parked is None:
            if not self._tasks():
                self.alone.clear()
            return
        self.alone.set()
        if not self._tasks() and not self.ingesting.is_set():
            job, self._parked = self._parked, None
            self._start(job)

    def _start(self, job: Job) -> None:
        if job.kind == "answer":
            answer = self._answers[job.id] = AnswerJob(self._context, job)
            with logged(job):
                log.info("answer, attempt %d", job.attempts)
                self._begin_answer(answer)
            return
        prefill = self._prefills[job.id] = PrefillJob(self._context, job)
        with logged(job):
            log.info("prefill, attempt %d", job.attempts)
            try:
                self._runs.join(prefill.request(), prefill)
            except Exception as error:
                self._fail(prefill, error)

    def _begin_ready(self) -> None:
        for answer in list(self._ready):
            is_other = answer.job.tenant not in self._tenants_answering()
            if self._answering() < (MAX_WITH_OTHERS if is_other else MAX_ANSWERS):
                self._ready.remove(answer)
                self._begin_answer(answer)

    # --- steps -------------------------------------------------------------------------------------------------

    def _begin_answer(self, answer: AnswerJob) -> None:
        try:
            if (missing := answer.start()) is not None:
                self._runs.join(missing, answer)
        except Exception as error:
            self._fail(answer, error)

    def _step_answers(self) -> None:
        answering = [answer for answer in self._answers.values() if answer.has_begun]
        begun = self._first_tokens()
        for answer in answering:
            self._step_answer(answer)
        if self._runs.runs:  # a prefill's step may take long
            for answer in (*answering, *begun):
                self._flush(answer)

    def _first_tokens(self) -> list[AnswerJob]:
        """Read new questions until time is up: one alone may take longer than a token of each answer."""
        begun, started = list[AnswerJob](), time.perf_counter()
        while time.perf_counter() - started < QUESTIONS_S and (answer := self._new_question()) is not None:
            self._step_answer(answer)
            begun.append(answer)
        return begun

    def _new_question(self) -> AnswerJob | None:
        """The oldest that has KV and no token yet; claimed if there is none."""
        while not self._stop.is_set():
            self._begin_ready()
            for answer in self._answers.values():
                if answer.answering and not answer.has_begun:
                    return answer
            if not self._claim_answer():
                return None
        return None

    def _step_answer(self, answer: AnswerJob) -> None:
        with logged(answer.job):
            self._step_logged(answer)

    def _step_logged(self, answer: AnswerJob) -> None:
        started = time.perf_counter()
        try:
            missing = answer.step()
            self._worked("answer", started)
            if missing is not None:
                self._runs.join(missing, answer)
            elif answer.ended:
                answer.finish()
                self._ended(answer, "succeeded")
        except LeaseLost:
            self._drop(answer)
        except Exception as error:
            self._fail(answer, error)

    def _flush(self, answer: AnswerJob) -> None:
        if answer.job.id in self._answers:
            try:
                answer.flush()
            except LeaseLost:
                self._drop(answer)
            except Exception as error:
                self._fail(answer, error)

    def _step_prefill(self, run: PrefillRun) -> None:
        metrics, started = self._context.metrics, time.perf_counter()
        waited_s = metrics.kv_waited_s
        try:
            with logged(run.waiters[0].job):
                more = run.step(self._context.engine.start_prefill)
                self._worked("prefill", started)
                run.kv_waited_s += metrics.kv_waited_s - waited_s
                if more:
                    return
                assert run.prefill is not None
                result = run.prefill.result
        except Exception as error:
            retried = [self._fail(waiter, error) for waiter in self._runs.end(run)]
            if not any(retried):
                self._context.kv.discard(run.request.owner)
            return
        metrics.prefill_ended(result, self._context.kind_of(run.request.holder))
        waiters = self._runs.end(run)
        metrics.tenant_tokens.labels(metrics.tenant(waiters[0].job.tenant), "prompt").inc(
            result.num_tokens - result.cached_tokens
        )
        for waiter in waiters:
            with logged(waiter.job):
                self._prefilled(waiter, run.request, result, run.kv_waited_s)
        self._context.documents.abandon_holder(run.request.holder)  # its document may be gone since the last look

    def _worked(self, stage: str, started: float) -> None:
        self._computed_s[stage] += time.perf_counter() - started
        if self._computed_s[stage] > COUNTED_S:
            self._count_work()

    def _count_work(self) -> None:
        for stage, seconds in self._computed_s.items():
            self._context.metrics.device_seconds.labels(self._context.device, stage).inc(seconds)
            self._computed_s[stage] = 0.0

    def _prefilled(self, waiter: Waiter, request: PrefillRequest, result: PrefillResult, kv_waited_s: float) -> None:
        if isinstance(waiter, AnswerJob):
            waiter.prefilled(request, result, kv_waited_s)
            self._ready.append(waiter)
            return
        assert isinstance(waiter, PrefillJob)
        try:
            waiter.finish(request, result, kv_waited_s)
            self._ended(waiter, "succeeded")
            log.info("prefilled %d tokens in %.2f s, density %.3f", result.num_tokens, result.seconds, result.density)
        except LeaseLost:
            self._drop(waiter)
        except Exception as error:
            self._fail(waiter, error)

    # --- ends --------------------------------------------------------------------------------------------------

    def _tasks(self) -> list[AnswerJob | PrefillJob]:
        return [*self._answers.values(), *self._prefills.values()]

    def _drop_lost(self) -> None:
        for task in self._tasks():
            if not self._context.leases.holds(task.job):
                log.info("job %s was cancelled or taken over", task.job.id)
                self._drop(task)
        if self._parked is not None and not self._context.leases.holds(self._parked):
            self._context.leases.drop(self._parked)
            self._parked = None

    def _drop(self, task: Waiter) -> None:
        """Stop its work, unless others wait for it too."""
        self._forget(task)
        self._runs.leave(task)

    def _forget(self, task: Waiter) -> None:
        self._context.leases.drop(task.job)
        self._prefills.pop(task.job.id, None)
        answer = self._answers.pop(task.job.id, None)
        if answer is not None:
            if answer in self._ready:
                self._ready.remove(answer)
            answer.close()

    def _ended(self, task: Waiter, state: str) -> None:
        self._context.metrics.jobs_ended.labels(task.job.kind, state).inc()
        self._forget(task)

    def _fail(self, task: Waiter, error: Exception) -> bool:
        """True if the job is tried again."""
        failure = failure_of(error)
        with logged(task.job):
            log.warning(
                "%s: %s", failure.error["code"], failure.error["message"], exc_info=error if failure.retry else None
            )
        task.failed(failure.error["code"])
        self._drop(task)
        again = False
        try:
            ended = self._context.queue.fail(task.job, failure.error, retry=failure.retry)
            self._context.metrics.job_failed(task.job.kind, ended.state, failure.error["code"])
            again = ended.state == "queued"
        except LeaseLost:
            pass
        except Exception:  # its lease will end, and the job go to the next attempt
            log.exception("failure of job %s not recorded", task.job.id)
            again = True
        if "CUDA error" in str(error) or isinstance(error, RankLost):  # nothing works on the device behind one of these
            raise EngineBroken(str(error)) from error
        return again

    def _release(self) -> None:
        self._count_work()
        jobs = [task.job for task in self._tasks()] + ([self._parked] if self._parked else [])
        for task in self._tasks():
            self._forget(task)
        for job in jobs:
            self._context.leases.drop(job)
            try:
                self._context.queue.release(job)
            except LeaseLost:
                pass
            except Exception:
                log.exception("job %s not released", job.id)
