"""What every queue backend must do. Backends subclass QueueContract and give it a `backend` fixture."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import pytest

from service.documents.base import CollectedDocuments
from service.queue.base import (
    AGEING_S,
    SCRUBBED,
    Effects,
    Job,
    LeaseLost,
    NewJob,
    NotRequeued,
    Queue,
    RecordChange,
    UnknownJob,
    retry_delay_s,
)

LEASE_S = 10.0
processes = multiprocessing.get_context("spawn")


class Backend(Protocol):
    """Opens queues over one storage. It is pickled into other processes."""

    def queue(self, clock: Callable[[], float] | None = None) -> Queue:
        """`clock` in place of every clock that the queue goes by."""
        ...

    def documents(self) -> CollectedDocuments: ...

    def close(self) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def opened(backend: Backend) -> Iterator[Queue]:
    queue = backend.queue()
    try:
        yield queue
    finally:
        queue.close()
        backend.close()


def claim_all(backend: Backend, worker: str, claimed: Any, ready: Any, go: Any) -> None:
    with opened(backend) as queue:
        ready.release()
        go.wait(30)
        while (job := queue.claim(worker, ["answer"], lease_s=60)) is not None:
            queue.finish(job, {"worker": worker})
            claimed.put((worker, job.id))


def claim_and_hang(backend: Backend, claimed: Any) -> None:
    with opened(backend) as queue:
        job = queue.claim("victim", ["prefill"], lease_s=0.5)
        assert job is not None
        queue.emit(job, [("token", {"text": "before"})])
        claimed.put(job.id)
        time.sleep(60)


def put_same(backend: Backend, number: int, found: Any, ready: Any, go: Any) -> None:
    with opened(backend) as queue:
        ready.release()
        go.wait(30)
        found.put(queue.put(NewJob("prefill", "t", {"number": number}, single_flight="doc-1:default")).id)


def emit_when_told(backend: Backend, job: Job, go: Any, sent_at: Any) -> None:
    with opened(backend) as queue:
        for number in range(5):
            go.acquire(timeout=30)
            sent_at.put(time.time())
            queue.emit(job, [("token", {"text": str(number)})])


def claimed(job: Job | None) -> Job:
    assert job is not None
    return job


class QueueContract:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def queue(self, backend: Backend, clock: Clock) -> Iterator[Queue]:
        queue = backend.queue(clock)
        yield queue
        queue.close()

    def claim(self, queue: Queue, kind: str = "answer") -> Job:
        job = queue.claim("w", [kind], lease_s=LEASE_S)
        assert job is not None
        return job

    # --- put ---------------------------------------------------------------------------------------------------

    def test_put_keeps_all_fields(self, queue: Queue, clock: Clock) -> None:
        payload = {"text": "naïve ☃", "list": [1, 2], "none": None, "nested": {"x": 1.5}}
        job = queue.put(NewJob("ingest", "acme", payload, priority=3, job_id="job-1"))
        assert job == queue.get("job-1")
        assert (job.id, job.kind, job.tenant, job.priority) == ("job-1", "ingest", "acme", 3)
        assert (job.state, job.attempts, job.epoch, job.created_at) == ("queued", 0, 0, clock.now)
        assert job.payload == payload

    def test_put_twice_with_one_id_changes_nothing(self, queue: Queue, backend: Backend) -> None:
        first = queue.put(NewJob("ingest", "t", {"n": 1}, job_id="job-1"))
        again = queue.put(NewJob("ingest", "t", {"n": 2}, job_id="job-1"), new_file("file-1"))
        assert again == first
        assert queue.counts() == {"queued": 1}
        assert backend.documents().files("t", limit=9, after=None, order="asc", purpose=None) == []
        queue.finish(self.claim(queue, "ingest"), {})
        assert queue.put(NewJob("ingest", "t", {}, job_id="job-1")).state == "succeeded"

    def test_put_is_one_with_its_effects(self, queue: Queue, backend: Backend) -> None:
        queue.put(NewJob("ingest", "t", {}), new_file("file-1"))
        assert backend.documents().file("t", "file-1").filename == "a.txt"
        with pytest.raises(ValueError, match="no column shoe_size"):
            queue.put(NewJob("ingest", "t", {}), Effects([RecordChange("files", "file-1", {"shoe_size": 43})]))
        assert queue.counts() == {"queued": 1}

    def test_single_flight(self, queue: Queue) -> None:
        new = NewJob("prefill", "t", {}, single_flight="doc-1:default")
        first = queue.put(new)
        assert queue.put(new).id == first.id
        running = self.claim(queue, "prefill")
        assert queue.put(new).id == first.id
        queue.finish(running, {})
        assert queue.put(new).id != first.id

    def test_refuses_zero_attempts(self, queue: Queue) -> None:
        with pytest.raises(ValueError, match="max_attempts is 0"):
            queue.put(NewJob("answer", "t", {}, max_attempts=0))

    # --- order of claims ---------------------------------------------------------------------------------------

    def test_claim_takes_only_its_kinds(self, queue: Queue) -> None:
        queue.put(NewJob("ingest", "t", {}))
        assert queue.claim("w", ["answer", "prefill"], lease_s=LEASE_S) is None
        job = self.claim(queue, "ingest")
        assert (job.state, job.attempts, job.epoch) == ("running", 1, 1)
        assert queue.claim("w", ["ingest"], lease_s=LEASE_S) is None

    def test_higher_priority_first_then_oldest(self, queue: Queue, clock: Clock) -> None:
        for name, priority in [("low", 0), ("high", 10), ("high2", 10), ("mid", 5)]:
            queue.put(NewJob("answer", "t", {}, priority=priority, job_id=name))
            clock.now += 0.1
        assert [self.claim(queue).id for _ in range(4)] == ["high", "high2", "mid", "low"]

    def test_waiting_raises_priority(self, queue: Queue, clock: Clock) -> None:
        queue.put(NewJob("answer", "t", {}, priority=0, job_id="patient"))
        clock.now += 3600
        queue.put(NewJob("answer", "t", {}, priority=10, job_id="fresh"))
        assert self.claim(queue).id == "patient"

    def test_a_wait_of_half_a_minute_is_worth_one_step(self, queue: Queue, clock: Clock) -> None:
        queue.put(NewJob("answer", "t", {}, priority=0, job_id="older"))
        clock.now += AGEING_S - 1
        queue.put(NewJob("answer", "t", {}, priority=1, job_id="higher"))
        clock.now += 2
        queue.put(NewJob("answer", "t", {}, priority=1, job_id="late"))
        assert [self.claim(queue).id for _ in range(3)] == ["higher", "older", "late"]

    def test_priority_of_one_tenant_holds_up_no_other(self, queue: Queue) -> None:
        for number in range(20):
            queue.put(NewJob("answer", "loud", {}, priority=100, cost_tokens=2000, job_id=f"loud-{number}"))
        for number in range(3):
            queue.put(NewJob("answer", "meek", {}, cost_tokens=2000, job_id=f"meek-{number}"))
        served = Counter(self.claim(queue).tenant for _ in range(6))
        assert served == {"loud": 3, "meek": 3}

    def test_a_flood_holds_up_nobody_else(self, queue: Queue, clock: Clock) -> None:
        for number in range(50):
            queue.put(NewJob("answer", "flood", {}, cost_tokens=5000, job_id=f"flood-{number}"))
        for tenant in ("a", "b"):
            queue.put(NewJob("answer", tenant, {}, cost_tokens=5000, job_id=tenant))
        served = [self.claim(queue).id for _ in range(4)]
        assert {"a", "b"} <= set(served)

    def test_tenants_share_by_tokens(self, queue: Queue) -> None:
        for number in range(60):
            queue.put(NewJob("prefill", "long", {}, cost_tokens=50_000, job_id=f"long-{number}"))
            queue.put(NewJob("prefill", "short", {}, cost_tokens=10_000, job_id=f"short-{number}"))
        served = Counter(self.claim(queue, "prefill").tenant for _ in range(36))
        assert 25 <= served["short"] <= 33  # one long to five short: 30 of 36

    def test_short_jobs_are_found_behind_long_ones(self, queue: Queue, clock: Clock) -> None:
        for name, cost in [("long", 50_000), ("longer", 90_000), ("short", 900), ("shorter", 800)]:
            queue.put(NewJob("prefill", "t", {}, cost_tokens=cost, job_id=name))
            clock.now += 0.1
        queue.put(NewJob("answer", "t", {}, cost_tokens=1, job_id="answer"))

        def overtaking() -> str | None:
            job = queue.claim("w", ["prefill"], lease_s=LEASE_S, below=50_000)
            return None if job is None else job.id

        assert [overtaking() for _ in range(3)] == ["short", "shorter", None], "in the order of their line"
        queue.put(NewJob("prefill", "t", {}, cost_tokens=500, job_id="gone"))
        queue.cancel("gone")
        queue.put(NewJob("prefill", "t", {}, cost_tokens=500, job_id="resting"))
        queue.fail(claimed(queue.claim("w", ["prefill"], lease_s=LEASE_S, below=501)), {"code": "x"}, retry=True)
        assert overtaking() is None
        clock.now += retry_delay_s(1)
        assert overtaking() == "resting"
        assert [self.claim(queue, "prefill").id for _ in range(2)] == ["long", "longer"]

    def test_tenants_can_be_left_out(self, queue: Queue) -> None:
        for number in range(3):
            for tenant in ("a", "b", "c"):
                queue.put(NewJob("answer", tenant, {}, cost_tokens=10 + number))
        served = [claimed(queue.claim("w", ["answer"], lease_s=LEASE_S, without={"a", "c"})).tenant for _ in range(3)]
        assert served == ["b"] * 3
        assert queue.claim("w", ["answer"], lease_s=LEASE_S, without={"a", "c"}) is None
        assert queue.claim("w", ["answer"], lease_s=LEASE_S, without={"a"}, below=10) is None
        assert claimed(queue.claim("w", ["answer"], lease_s=LEASE_S, without={"a"}, below=11)).tenant == "c"
        assert Counter(self.claim(queue).tenant for _ in range(5)) == {"a": 3, "c": 2}

    def test_a_flood_of_short_jobs_holds_up_no_other_tenants(self, queue: Queue, clock: Clock) -> None:
        for number in range(50):
            queue.put(NewJob("prefill", "flood", {}, cost_tokens=100, job_id=f"flood-{number}"))
        for tenant in ("a", "b"):
            queue.put(NewJob("prefill", tenant, {}, cost_tokens=50_000))
            queue.put(NewJob("prefill", tenant, {}, cost_tokens=500, job_id=tenant))
        served = [claimed(queue.claim("w", ["prefill"], lease_s=LEASE_S, below=1000)).id for _ in range(4)]
        assert {"a", "b"} <= set(served)

    # --- leases and fencing ------------------------------------------------------------------------------------

    def test_lease_ends_and_another_takes_over(self, queue: Queue, clock: Clock) -> None:
        queue.put(NewJob("answer", "t", {}, job_id="job-1"))
        lost = self.claim(queue)
        clock.now += LEASE_S - 1
        assert queue.reclaim() == 0
        clock.now += 2
        assert queue.reclaim() == 1
        assert queue.reclaim() == 0
        second = self.claim(queue)
        assert (second.id, second.attempts) == (lost.id, 2)
        assert second.epoch > lost.epoch
        queue.finish(second, {"by": "second"})
        assert queue.get("job-1").result == {"by": "second"}

    def test_extend_keeps_the_lease(self, queue: Queue, clock: Clock) -> None:
        queue.put(NewJob("answer", "t", {}))
        job = self.claim(queue)
        for _ in range(3):
            clock.now += LEASE_S - 1
            queue.extend(job, lease_s=LEASE_S)
            assert queue.reclaim() == 0
            assert queue.holds(job)

    @pytest.mark.parametrize("how", ["lease", "cancel"])
    def test_who_lost_the_job_can_do_nothing(self, queue: Queue, backend: Backend, clock: Clock, how: str) -> None:
        queue.put(NewJob("answer", "t", {}, job_id="job-1"), new_file("file-1"))
        lost = self.claim(queue)
        if how == "lease":
            clock.now += LEASE_S + 1
            queue.reclaim()
            self.claim(queue)
        else:
            queue.cancel("job-1")
        before, events = queue.get("job-1"), queue.events("job-1")
        assert not queue.holds(lost)
        effects = Effects([RecordChange("files", "file-1", {"filename": "stolen"})], [NewJob("prefill", "t", {})])
        attempts: list[Callable[[], object]] = [
            lambda: queue.extend(lost, lease_s=LEASE_S),
            lambda: queue.progress(lost, 0.5),
            lambda: queue.emit(lost, [("token", {"text": "ghost"})]),
            lambda: queue.finish(lost, {}, effects),
            lambda: queue.fail(lost, {"code": "x", "message": "x"}, retry=False, effects=effects),
            lambda: queue.release(lost),
        ]
        for attempt in attempts:
            with pytest.raises(LeaseLost):
                attempt()
        assert queue.get("job-1") == before
        assert queue.events("job-1") == events
        assert backend.documents().file("t", "file-1").filename == "a.txt"

    def test_release_gives_back_without_counting(self, queue: Queue) -> None:
        queue.put(NewJob("answer", "t", {}, max_attempts=1))
        for _ in range(3):
            job = self.claim(queue)
            assert job.attempts == 1
            queue.release(job)
        assert queue.get(job.id).state == "queued"

    # --- ends --------------------------------------------------------------------------------------------------

    def test_finish_once_with_effects_and_follow_up(self, queue: Queue, backend: Backend) -> None:
        queue.put(NewJob("ingest", "t", {}), new_file("file-1"))
        job = self.claim(queue, "ingest")
        effects = Effects([RecordChange("files", "file-1", {"filename": "b.txt"})], [NewJob("prefill", "t", {"n": 1})])
        queue.finish(job, {"tokens": 7}, effects)
        with pytest.raises(LeaseLost):
            queue.finish(job, {"tokens": 8}, effects)
        ended = queue.get(job.id)
        assert (ended.state, ended.result, ended.progress) == ("succeeded", {"tokens": 7}, 1.0)
        assert ended.finished_at is not None
        assert backend.documents().file("t", "file-1").filename == "b.txt"
        assert self.claim(queue, "prefill").payload == {"n": 1}
        assert queue.claim("w", ["prefill"], lease_s=LEASE_S) is None

    def test_finish_is_all_or_nothing(self, queue: Queue) -> None:
        queue.put(NewJob("answer", "t", {}))
        job = self.claim(queue)
        bad = Effects([RecordChange("documents", "doc-1", {"nonsense": 1})], [NewJob("prefill", "t", {})])
        with pytest.raises(ValueError, match="no column nonsense"):
            queue.finish(job, {}, bad)
        assert queue.get(job.id).state == "running"
        assert queue.counts() == {"running": 1}
        queue.finish(job, {})

    def test_fail_retries_then_dies_with_the_reason(self, queue: Queue, backend: Backend, clock: Clock) -> None:
        queue.put(NewJob("answer", "t", {}, max_attempts=2), new_file("file-1"))
        error = {"code": "engine_error", "message": "it broke"}
        effects = Effects([RecordChange("files", "file-1", {"filename": "gave up"})])
        assert queue.fail(self.claim(queue), error, retry=True, effects=effects).state == "queued"
        assert backend.documents().file("t", "file-1").filename == "a.txt"
        assert queue.claim("w", ["answer"], lease_s=LEASE_S) is None, "it rests"
        clock.now += retry_delay_s(1)
        ended = queue.fail(self.claim(queue), error, retry=True, effects=effects)
        assert (ended.state, ended.error, ended.attempts) == ("dead", error, 2)
        assert backend.documents().file("t", "file-1").filename == "gave up"
        assert queue.claim("w", ["answer"], lease_s=LEASE_S) is None

    def test_resting_job_holds_up_nobody(self, queue: Queue, clock: Clock) -> None:
        queue.put(NewJob("answer", "t", {}, job_id="resting"))
        queue.fail(self.claim(queue), {"code": "x", "message": "x"}, retry=True)
        queue.put(NewJob("answer", "t", {}, job_id="other"))
        assert self.claim(queue).id == "other"
        start = time.monotonic()
        queue.wait(0.2, ["answer"])
        assert time.monotonic() - start > 0.15, "nothing can be claimed yet"
        clock.now += retry_delay_s(1)
        queue.wait(20, ["answer"])
        assert time.monotonic() - start < 10
        assert self.claim(queue).id == "resting"

    def test_permanent_failure_is_not_retried(self, queue: Queue) -> None:
        queue.put(NewJob("answer", "t", {}))
        error = {"code": "context_length_exceeded", "message": "9 tokens, 8 allowed"}
        assert queue.fail(self.claim(queue), error, retry=False).state == "failed"

    def test_job_that_kills_its_workers_ends_dead(self, queue: Queue, clock: Clock) -> None:
        queue.put(NewJob("answer", "t", {}, job_id="poison", max_attempts=3))
        queue.put(NewJob("prefill", "t", {}, job_id="innocent"))
        for _ in range(3):
            self.claim(queue)
            clock.now += LEASE_S + 1
            assert queue.reclaim() == 1
        dead = queue.get("poison")
        assert dead.state == "dead"
        assert dead.error is not None
        assert dead.error["code"] == "worker_lost"
        assert "3 attempts" in dead.error["message"]
        assert queue.get("innocent").state == "queued"

    def test_cancel_queued_and_running(self, queue: Queue) -> None:
        for name in ("one", "two"):
            queue.put(NewJob("answer", "t", {}, job_id=name))
        running = self.claim(queue)
        for name in ("one", "two"):
            job = queue.cancel(name)
            assert (job.state, job.cancel_requested) == ("cancelled", True)
        with pytest.raises(LeaseLost):
            queue.extend(running, lease_s=LEASE_S)
        assert queue.claim("w", ["answer"], lease_s=LEASE_S) is None
        assert queue.cancel("one") == queue.get("one")

    def test_cancel_leaves_an_ended_job_alone(self, queue: Queue) -> None:
        queue.put(NewJob("answer", "t", {}))
        job = self.claim(queue)
        queue.finish(job, {"text": "done"})
        assert queue.cancel(job.id).state == "succeeded"
        assert queue.events(job.id)[-1].data["state"] == "succeeded"

    def test_known_leaves_out_what_is_not_there(self, queue: Queue) -> None:
        jobs = [queue.put(NewJob("answer", "t", {"number": number})) for number in range(3)]
        assert queue.known([job.id for job in jobs] + ["nobody"]) == {job.id: job for job in jobs}
        assert queue.known([]) == {}

    def test_unknown_job(self, queue: Queue) -> None:
        for ask in (queue.get, queue.cancel, queue.events):
            with pytest.raises(UnknownJob, match="job-none"):
                ask("job-none")

    def test_what_only_a_dead_process_reads_ends(self, queue: Queue, clock: Clock) -> None:
        for reader in ("api-1", "api-2"):
            queue.attend(reader, for_s=10)
        queue.put(NewJob("answer", "t", {}, job_id="mine", reader="api-1", priority=9))
        queue.put(NewJob("answer", "t", {}, job_id="ours", reader="api-1"))
        queue.put(NewJob("answer", "t", {}, job_id="ours", reader="api-2"))
        queue.put(NewJob("answer", "t", {}, job_id="background"))
        running = self.claim(queue)
        assert running.id == "mine"
        clock.now += 6
        queue.attend("api-2", for_s=10)
        queue.extend(running, lease_s=60)
        queue.reclaim()
        assert queue.holds(running)
        clock.now += 6
        queue.reclaim()
        assert not queue.holds(running)
        ended = queue.get("mine")
        assert (ended.state, ended.error and ended.error["code"]) == ("cancelled", "abandoned")
        assert [queue.get(name).state for name in ("ours", "background")] == ["queued", "queued"]
        clock.now += 60
        queue.reclaim()
        assert [queue.get(name).state for name in ("ours", "background")] == ["cancelled", "queued"]

    def test_a_reader_that_was_never_heard_of_is_left_alone(self, queue: Queue, clock: Clock) -> None:
        queue.put(NewJob("answer", "t", {}, job_id="job-1", reader="api-1"))
        clock.now += 1000
        queue.reclaim()
        assert queue.get("job-1").state == "queued"

    # --- events ------------------------------------------------------------------------------------------------

    def test_event_log_has_no_gaps(self, queue: Queue) -> None:
        job_id = queue.put(NewJob("answer", "t", {})).id
        job = self.claim(queue)
        queue.progress(job, 0.25, {"stage": "prefill", "eta_s": 3.0})
        queue.emit(job, [("token", {"text": "a"}), ("token", {"text": "é☃"})])
        queue.finish(job, {})
        events = queue.events(job_id)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert [event.type for event in events] == ["state", "state", "progress", "token", "token", "done"]
        assert events[2].data == {"progress": 0.25, "stage": "prefill", "eta_s": 3.0}
        assert events[4].data == {"text": "é☃"}
        assert queue.events(job_id, 4) == events[4:]
        assert queue.get(job_id).detail == {"stage": "prefill", "eta_s": 3.0}

    def test_events_wait_no_longer_than_asked(self, queue: Queue) -> None:
        job_id = queue.put(NewJob("answer", "t", {})).id
        start = time.monotonic()
        assert queue.events(job_id, 1, timeout_s=0.3) == []
        assert 0.25 < time.monotonic() - start < 2

    def test_events_of_an_ended_job_return_at_once(self, queue: Queue) -> None:
        job_id = queue.put(NewJob("answer", "t", {})).id
        queue.cancel(job_id)
        last = queue.events(job_id)[-1].seq
        start = time.monotonic()
        assert queue.events(job_id, last, timeout_s=20) == []
        assert time.monotonic() - start < 5

    def test_waiting_reader_gets_an_event_within_milliseconds(self, backend: Backend) -> None:
        queue = backend.queue()
        queue.put(NewJob("answer", "t", {}))
        job = self.claim(queue)
        go, sent_at = processes.Semaphore(0), processes.Queue()
        other = processes.Process(target=emit_when_told, args=(backend, job, go, sent_at))
        other.start()
        delays, seen = [], queue.events(job.id)[-1].seq
        for number in range(5):
            threading.Timer(0.05, go.release).start()
            events = queue.events(job.id, seen, timeout_s=30)
            delays.append(time.time() - sent_at.get(timeout=30))
            assert [event.data["text"] for event in events] == [str(number)]
            seen = events[-1].seq
        other.join(30)
        queue.close()
        assert min(delays) < 0.1  # the machine may be busy; a reader that polls each half second can't do this

    async def test_a_thousand_async_readers(self, backend: Backend) -> None:
        queue, other = backend.queue(), backend.queue()
        for number in range(20):
            queue.put(NewJob("answer", "t", {}, job_id=f"job-{number}"))
        claimed = [self.claim(queue) for _ in range(20)]
        seen = {job.id: queue.events(job.id)[-1].seq for job in claimed}
        threads_before = threading.active_count()
        readers = [
            asyncio.create_task(queue.events_async(job.id, seen[job.id], timeout_s=60))
            for job in claimed
            for _ in range(50)
        ]
        await asyncio.sleep(0.5)
        assert threading.active_count() < threads_before + 50
        assert not any(reader.done() for reader in readers)
        for job in claimed:
            other.emit(job, [("token", {"text": job.id})])
        results = await asyncio.wait_for(asyncio.gather(*readers), 60)
        assert [events[0].data["text"] for events in results] == [job.id for job in claimed for _ in range(50)]
        queue.close()
        other.close()

    async def test_async_reader_gives_up_in_time(self, queue: Queue) -> None:
        job_id = queue.put(NewJob("answer", "t", {})).id
        assert await queue.events_async(job_id, 1, timeout_s=0.1) == []
        with pytest.raises(UnknownJob):
            await queue.events_async("job-none", timeout_s=0.1)

    # --- housekeeping ------------------------------------------------------------------------------------------

    def test_prune_forgets_only_old_ended_jobs(self, queue: Queue, clock: Clock) -> None:
        for name in ("old", "waiting"):
            queue.put(NewJob("answer", "t", {}, job_id=name))
        queue.finish(self.claim(queue), {})
        clock.now += 100
        queue.put(NewJob("answer", "t", {}, priority=50, job_id="new"))
        queue.finish(self.claim(queue), {})
        assert queue.prune(clock.now - 50) == 1
        with pytest.raises(UnknownJob):
            queue.events("old")
        assert queue.counts() == {"queued": 1, "succeeded": 1}

    def test_age_of_the_oldest_waiting_job(self, queue: Queue, clock: Clock) -> None:
        assert queue.oldest_queued_age_s() == 0.0
        queue.put(NewJob("answer", "t", {}))
        clock.now += 42
        queue.put(NewJob("answer", "t", {}))
        assert queue.oldest_queued_age_s() == pytest.approx(42)
        self.claim(queue)
        assert queue.oldest_queued_age_s() == pytest.approx(0)

    # --- administration ----------------------------------------------------------------------------------------

    def test_lanes_say_who_waits_for_what(self, queue: Queue, clock: Clock) -> None:
        for tenant in ("a", "a", "b"):
            queue.put(NewJob("prefill", tenant, {}))
            clock.now += 10
        queue.put(NewJob("answer", "a", {}))
        queue.finish(self.claim(queue), {})
        running = self.claim(queue, "prefill")
        assert (running.tenant, running.worker, queue.get(running.id).worker) == ("a", "w", "w")
        lanes = {(lane.kind, lane.tenant): lane for lane in queue.lanes()}
        assert lanes.keys() == {("prefill", "a"), ("prefill", "b")}
        assert [(lanes["prefill", t].queued, lanes["prefill", t].running) for t in "ab"] == [(1, 1), (1, 0)]
        assert lanes["prefill", "a"].oldest_queued_age_s == pytest.approx(20)
        queue.finish(running, {})
        assert queue.get(running.id).worker is None

    def test_jobs_of_a_state_newest_first(self, queue: Queue, clock: Clock) -> None:
        for name in ("one", "two", "three"):
            queue.put(NewJob("answer", "t", {}, job_id=name))
            queue.fail(self.claim(queue), {"code": "x", "message": name}, retry=False)
            clock.now += 1
        assert [job.id for job in queue.jobs("failed", limit=2)] == ["three", "two"]
        assert queue.jobs("dead", limit=2) == []

    def test_requeued_job_begins_anew(self, queue: Queue, clock: Clock) -> None:
        queue.put(NewJob("answer", "t", {"n": 1}, job_id="job-1", max_attempts=1))
        for refused in ("job-1", "job-none"):
            with pytest.raises((NotRequeued, UnknownJob)):
                queue.requeue(refused)
        lost = self.claim(queue)
        assert queue.fail(lost, {"code": "x", "message": "x"}, retry=True).state == "dead"
        again = queue.requeue("job-1")
        assert (again.state, again.attempts, again.error, again.finished_at) == ("queued", 0, None, None)
        assert not queue.holds(lost)
        job = self.claim(queue)
        assert (job.attempts, job.payload) == (1, {"n": 1})
        queue.finish(job, {"ok": True})
        kinds = [event.data["state"] for event in queue.events("job-1") if event.type in ("state", "done")]
        assert kinds == ["queued", "running", "dead", "queued", "running", "succeeded"]
        with pytest.raises(NotRequeued, match="succeeded"):
            queue.requeue("job-1")

    def test_requeue_keeps_single_flight(self, queue: Queue) -> None:
        new = NewJob("prefill", "t", {}, single_flight="doc-1:default")
        first = queue.put(new)
        queue.fail(self.claim(queue, "prefill"), {"code": "x", "message": "x"}, retry=False)
        second = queue.put(new)
        with pytest.raises(NotRequeued, match=second.id):
            queue.requeue(first.id)

    @pytest.mark.parametrize("stage", ["ingest", "prefill"])
    def test_files_wait_again_for_a_requeued_job(self, queue: Queue, backend: Backend, stage: str) -> None:
        documents, error = backend.documents(), {"code": "x", "message": "it broke"}
        if stage == "ingest":
            file = new_file("file-1", ingest_job="job-1")
            queue.put(NewJob("ingest", "t", {}, job_id="job-1"), file)
        else:
            queue.put(NewJob("prefill", "t", {}, job_id="job-1", single_flight="doc-1:default"), new_document())
        queue.fail(self.claim(queue, stage), error, retry=False)
        assert documents.file("t", "file-1").status == "error"
        queue.requeue("job-1")
        file = documents.file("t", "file-1")
        assert (file.status, file.error, file.status_details) == ("uploaded", None, None)
        job = self.claim(queue, stage)
        if stage == "prefill":
            queue.finish(job, {}, Effects([RecordChange("prefills", "doc-1:default", {"state": "ready"})]))
            assert documents.file("t", "file-1").status == "processed"

    def test_scrubbed_job_says_nothing(self, queue: Queue) -> None:
        for name in ("ended", "running"):
            queue.put(NewJob("answer", "t", {"question": "secret"}, job_id=name))
            job = self.claim(queue)
            queue.emit(job, [("token", {"text": "secret"})])
            if name == "ended":
                queue.finish(job, {"text": "secret"})
        for name in ("ended", "running", "unknown"):
            queue.scrub(name)
            queue.scrub(name)
        for name, state in (("ended", "succeeded"), ("running", "cancelled")):
            job = queue.get(name)
            assert (job.state, job.payload) == (state, SCRUBBED)
            assert job.result in (None, SCRUBBED)
            assert "secret" not in repr(queue.events(name))
            assert [event.seq for event in queue.events(name)] == [1, 2, 3, 4]

    def test_a_deleted_documents_answers_say_nothing(self, queue: Queue, backend: Backend) -> None:
        queue.put(NewJob("prefill", "t", {}, single_flight="doc-1:default"), new_document())
        for name in ("ended", "running", "waiting"):
            documents = ["doc-0", "doc-1"] if name == "ended" else ["doc-1"]
            queue.put(NewJob("answer", "t", {"documents": documents, "question": [1]}, priority=9, job_id=name))
            if name != "waiting":
                job = self.claim(queue)
                queue.emit(job, [("token", {"text": "secret"})])
            if name == "ended":
                queue.finish(job, {"text": "secret"})
        queue.put(NewJob("answer", "t", {"documents": ["doc-2"], "question": [2]}, job_id="other"))
        assert backend.documents().delete_file("t", "file-1") is not None
        for name in ("ended", "running", "waiting"):
            assert "secret" not in repr(queue.events(name)) + repr(queue.get(name))
            assert queue.get(name).payload == SCRUBBED
        for name in ("running", "waiting"):
            done = queue.events(name)[-1].data
            assert (done["state"], done["error"]["code"]) == ("cancelled", "document_deleted")
        assert queue.get("other").payload == {"documents": ["doc-2"], "question": [2]}

    # --- several processes -------------------------------------------------------------------------------------

    def test_wait_ends_when_a_job_is_put(self, backend: Backend) -> None:
        queue, other = backend.queue(), backend.queue()
        timer = threading.Timer(0.2, lambda: other.put(NewJob("answer", "t", {})))
        timer.start()
        start = time.monotonic()
        queue.wait(20)
        assert time.monotonic() - start < 10
        timer.join()
        start = time.monotonic()
        queue.wait(20)  # one is there already
        assert time.monotonic() - start < 10
        queue.close()
        other.close()

    def test_processes_never_claim_one_job_twice(self, backend: Backend) -> None:
        queue = backend.queue()
        for number in range(60):
            queue.put(NewJob("answer", f"tenant-{number % 3}", {}, job_id=f"job-{number}"))
        claimed, ready, go = processes.Queue(), processes.Semaphore(0), processes.Event()
        workers = [
            processes.Process(target=claim_all, args=(backend, f"w{number}", claimed, ready, go)) for number in range(3)
        ]
        for worker in workers:
            worker.start()
        for _ in workers:
            assert ready.acquire(timeout=60)
        go.set()
        pairs = [claimed.get(timeout=60) for _ in range(60)]
        for worker in workers:
            worker.join(30)
            assert worker.exitcode == 0
        assert sorted(job for _, job in pairs) == sorted(f"job-{number}" for number in range(60))
        assert all(
            queue.get(job).result == {"worker": worker} and queue.get(job).attempts == 1 for worker, job in pairs
        )
        queue.close()

    def test_processes_put_one_single_flight(self, backend: Backend) -> None:
        found, ready, go = processes.Queue(), processes.Semaphore(0), processes.Event()
        putters = [processes.Process(target=put_same, args=(backend, n, found, ready, go)) for n in range(3)]
        for putter in putters:
            putter.start()
        for _ in putters:
            assert ready.acquire(timeout=60)
        go.set()
        ids = {found.get(timeout=30) for _ in putters}
        for putter in putters:
            putter.join(30)
        assert len(ids) == 1

    def test_killed_claimant_loses_its_job_to_another(self, backend: Backend) -> None:
        queue = backend.queue()
        queue.put(NewJob("prefill", "t", {}, job_id="job-1"))
        claimed = processes.Queue()
        victim = processes.Process(target=claim_and_hang, args=(backend, claimed))
        victim.start()
        assert claimed.get(timeout=60) == "job-1"
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(30)
        deadline = time.monotonic() + 10
        while queue.reclaim() == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        job = self.claim(queue, "prefill")
        assert job.attempts == 2
        queue.finish(job, {"ok": True})
        kinds = [event.type for event in queue.events("job-1")]
        assert kinds == ["state", "state", "token", "state", "state", "done"]  # what was said before the kill is kept
        queue.close()


def new_file(file_id: str, **more: Any) -> Effects:
    fields = {"tenant": "t", "filename": "a.txt", "purpose": "user_data", "size_bytes": 5, "created_at": 1.0}
    return Effects([RecordChange("files", file_id, {**fields, **more})])


def new_document() -> Effects:
    """doc-1 with its prefill and one handle, file-1."""
    hashes = {"content_hash": "c", "stream_hash": "s", "tokenizer_digest": "d"}
    document = {"tenant": "t", **hashes, "num_tokens": 5, "folder": "documents/x", "created_at": 1.0}
    prefill = {"document_id": "doc-1", "tenant": "t", "fidelity": "default"}
    changes = [
        RecordChange("documents", "doc-1", document),
        RecordChange("prefills", "doc-1:default", prefill),
        *new_file("file-1", document_id="doc-1").changes,
    ]
    return Effects(changes)
