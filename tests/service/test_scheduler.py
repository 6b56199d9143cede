"""The worker's scheduler and its prefill and answer stages, around an engine that computes nothing."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import KVMissing
from engine.interfaces import AnswerDelta
from service.admission import MARGIN_BYTES
from service.database import DatabaseUnavailable
from service.queue.base import Job, JobKind
from service.scheduler import MAX_ANSWERS, QUESTIONS_S, EngineBroken
from tests.service.bench import Bench, until
from tests.service.fake_engine import LAYERS, STEP_S, FakeAnswer, FakePrefill

LONG = "LONG " * 1000
TTFT = "foreword_time_to_first_token_seconds_count"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def length(bench: Bench, *names: str) -> int:
    """Tokens of the prefix over these documents."""
    return len(bench.context.prefix("t", [f"doc-{name}" for name in names]))


def running(bench: Bench, job_id: str) -> bool:
    return bench.queue.get(job_id).progress > 0


# --- prefill and answer, one by one ----------------------------------------------------------------------------


def test_prefill_ends_in_records_and_metrics(bench: Bench) -> None:
    bench.add_document("a", "text")
    with bench.working():
        job = bench.ended("job-a")
    assert (job.state, job.progress) == ("succeeded", 1.0)
    record = bench.documents.prefill("doc-a:default")
    assert (record.state, record.digest, record.num_tokens) == ("ready", "digest-default", length(bench, "a"))
    assert record.recall == {"target": 0.95, "mean": 0.97, "p5": 0.9, "worst": 0.85, "below_target": False}
    assert record.heads == {"block_sparse": 90}
    assert record.head_map == ["bbb"] * 30
    assert record.cold_ttft_s is not None
    assert record.cold_ttft_s >= LAYERS * STEP_S
    assert bench.documents.file("t", "file-a").status == "processed"
    assert bench.sample(TTFT, model="fake", cache_state="cold") == 1
    assert bench.sample("foreword_prefills_total", cache_state="cold") == 1
    assert bench.sample("foreword_prompt_tokens_total", source="computed") == length(bench, "a")
    assert bench.kv.policies == {"doc-a:default": (None, False)}


def test_warm_answer(bench: Bench) -> None:
    bench.add_document("a", "text")
    with bench.working():
        bench.ended("job-a")
        job = bench.ended(bench.ask("a"))
    size = length(bench, "a")
    assert job.result is not None
    assert job.result["text"] == bench.text(job.id) == f"It is {size}"
    assert job.result["cached_tokens"] == size
    assert job.result["prompt_tokens"] == size + len("how long?")
    assert (job.result["completion_tokens"], job.result["finish_reason"]) == (3, "stop")
    assert (job.result["cache_state"], job.result["density"]) == ("warm_host", 0.4)
    assert bench.sample(TTFT, model="fake", cache_state="warm_host") == 1
    assert len(bench.engine.prefills) == 1


def test_answer_without_documents(bench: Bench) -> None:
    with bench.working():
        job = bench.ended(bench.ask())
    assert job.result is not None
    assert (job.result["text"], job.result["cached_tokens"], job.result["cache_state"]) == ("It is 0", 0, "cold")


def test_what_an_answer_computes_again_is_not_counted_as_cached(bench: Bench) -> None:
    bench.add_document("a", "some text")
    with bench.working():
        bench.ended("job-a")
        size = length(bench, "a")
        for computes, state, decision in ((3, "partial", "loaded_and_computed"), (size, "cold", "computed_instead")):
            bench.engine.computes = computes
            job = bench.ended(bench.ask("a"))
            assert job.result is not None
            assert (job.result["cached_tokens"], job.result["cache_state"]) == (size - computes, state)
            assert bench.sample("foreword_kv_decisions_total", decision=decision) == 1
    assert bench.sample("foreword_kv_decisions_total", decision="reused") == 0
    assert bench.sample("foreword_prompt_tokens_total", source="cached") == size - 3


def test_evicted_kv_is_made_again_within_the_answer(bench: Bench) -> None:
    bench.add_document("a", "text", prefill=False)
    with bench.working():
        job = bench.ended(bench.ask("a"))
    assert job.result is not None
    assert (job.result["cache_state"], job.result["cached_tokens"], job.result["density"]) == ("cold", 0, 0.4)
    assert [event.type for event in bench.queue.events(job.id)].count("progress") >= 1
    assert bench.documents.prefill("doc-a:default").state == "ready"
    assert bench.sample(TTFT, model="fake", cache_state="cold") == 1
    assert bench.sample("foreword_kv_decisions_total", decision="computed") == 1


def test_two_documents_have_a_holder_that_goes_with_either(bench: Bench) -> None:
    bench.add_document("a", "text", prefill=False)
    bench.add_document("b", "more", prefill=False)
    with bench.working():
        job = bench.ended(bench.ask("a", "b"))
        again = bench.ended(bench.ask("a", "b"))
    assert job.result is not None
    assert again.result is not None
    assert (job.result["cache_state"], again.result["cache_state"]) == ("cold", "warm_host")
    holder = bench.engine.prefills[0].request.holder
    assert holder.startswith("prefix-")
    garbage: list[str] = []
    bench.documents.delete_file("t", "file-b")
    bench.documents.collect(lambda piece: garbage.append(piece.name))
    assert holder in garbage


def test_kv_of_a_fidelity_that_no_handle_has_is_kept_with_the_document(bench: Bench) -> None:
    bench.add_document("a", "text", prefill=False)
    garbage: list[str] = []
    with bench.working():
        job = bench.ended(bench.ask("a", fidelity="strict"))
    assert job.state == "succeeded"
    bench.documents.collect(lambda piece: garbage.append(piece.name))
    assert "doc-a:strict" not in garbage
    bench.documents.delete_file("t", "file-a")
    bench.documents.collect(lambda piece: garbage.append(piece.name))
    assert "doc-a:strict" in garbage


def test_who_waited_for_the_upload_is_not_observed_twice(bench: Bench) -> None:
    bench.add_document("a", "text")
    with bench.working():
        bench.ended("job-a")
        job = bench.ended(bench.ask("a", waited=True))
    assert job.result is not None
    assert job.result["cache_state"] == "cold"
    assert job.result["cached_tokens"] == 0, "of the upload's prefill"
    assert bench.sample(TTFT, model="fake", cache_state="cold") == 1
    assert bench.sample(TTFT, model="fake", cache_state="warm_host") == 0


def test_max_tokens_ends_an_answer(bench: Bench) -> None:
    with bench.working():
        job = bench.ended(bench.ask(question="STORY", max_tokens=3))
    assert job.result is not None
    assert (job.result["text"], job.result["finish_reason"]) == ("0 1 2 ", "length")


def test_damaged_kv_is_computed_again_and_no_word_repeated(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.add_document("a", "text")
    step, damaged = FakeAnswer.step, []

    def fails_once(answer: FakeAnswer) -> AnswerDelta:
        if answer.completion_tokens == 2 and not damaged:
            damaged.append(True)
            bench.kv.path(bench.engine.key(answer.request.prefix, answer.request.salt, "default")).unlink()
            raise KVMissing("segment 0 is damaged")
        return step(answer)

    monkeypatch.setattr(FakeAnswer, "step", fails_once)
    with bench.working():
        bench.ended("job-a")
        job = bench.ended(bench.ask("a"))
    assert damaged
    assert bench.text(job.id) == f"It is {length(bench, 'a')}"
    assert bench.sample("foreword_kv_decisions_total", decision="recomputed_damaged") == 1
    assert len(bench.engine.prefills) == 2


# --- order -----------------------------------------------------------------------------------------------------


def test_answers_step_between_a_long_prefills_steps(bench: Bench) -> None:
    bench.add_document("long", LONG)
    bench.add_document("a", "text")
    with bench.working():
        bench.ended("job-a")
        until(lambda: running(bench, "job-long"))
        bench.engine.steps.clear()
        bench.ended(bench.ask("a", question="STORY", max_tokens=50))
        kinds = [kind for kind, _ in bench.engine.steps]
    first, last = kinds.index("answer"), len(kinds) - 1 - kinds[::-1].index("answer")
    between = kinds[first : last + 1]
    assert between.count("answer") == 50
    assert "prefill" in between, "the long prefill goes on meanwhile"
    assert all(not (a == b == "prefill") for a, b in itertools.pairwise(between))


def test_short_prefill_overtakes_a_long_one(bench: Bench) -> None:
    bench.add_document("long", LONG)
    with bench.working():
        until(lambda: running(bench, "job-long"))
        bench.add_document("short", "text")
        bench.engine.steps.clear()
        bench.ended("job-short")
        owners = [owner for _, owner in bench.engine.steps]
        assert bench.queue.get("job-long").state == "running"
    assert owners.count("job-long") >= 2, "the long one has its turn all the same"
    assert owners.count("job-long") <= len(owners) / 2


def test_a_short_prefill_overtakes_however_many_long_ones_wait(bench: Bench) -> None:
    for number in range(6):
        bench.add_document(f"long{number}", f"{number} {LONG}", cost_tokens=5000)
    with bench.working():
        until(lambda: running(bench, "job-long0"))
        bench.add_document("short", "text", cost_tokens=10)
        assert bench.ended("job-short").state == "succeeded"
        waiting = [bench.queue.get(f"job-long{number}").state for number in range(1, 6)]
    assert waiting == ["queued"] * 5, "each of them is for a worker that has nothing to do"


def test_a_prefill_as_long_as_what_is_left_of_another_is_left_to_others(bench: Bench) -> None:
    bench.add_document("long", LONG)
    with bench.working():
        until(lambda: running(bench, "job-long"))
        left = int(length(bench, "long") * (1 - bench.queue.get("job-long").progress))
        bench.add_document("same", "text", cost_tokens=left)
        bench.add_document("half", "text ", cost_tokens=left // 3)
        assert bench.ended("job-half").state == "succeeded"
        assert bench.queue.get("job-same").state == "queued"
        taken = bench.queue.claim("idle", ["prefill"], lease_s=60)
    assert taken is not None
    assert taken.id == "job-same"


def test_prefills_that_do_not_fit_together_wait_for_each_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path, free_bytes=MARGIN_BYTES + 6000, prefill_bytes=lambda tokens: tokens)
    bench.add_document("long", LONG)  # 5000 tokens
    with bench.working():
        until(lambda: running(bench, "job-long"))
        bench.add_document("large", "SLOW " * 400, cost_tokens=2000)
        bench.add_document("small", "text", cost_tokens=10)
        assert bench.ended("job-small").state == "succeeded", "what fits goes on"
        until(lambda: bench.queue.get("job-large").state == "running")
        assert len(bench.engine.prefills) == 2
        bench.queue.cancel("job-long")
        assert bench.ended("job-large").state == "succeeded"
    bench.close()


def test_a_long_prefill_goes_on_through_a_flood_of_questions(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.add_document("long", LONG)
    step = FakeAnswer.step

    def takes_long(answer: FakeAnswer) -> AnswerDelta:
        if answer.completion_tokens == 0:
            time.sleep(QUESTIONS_S / 2)
        return step(answer)

    monkeypatch.setattr(FakeAnswer, "step", takes_long)
    with bench.working():
        until(lambda: running(bench, "job-long"))
        bench.engine.steps.clear()
        jobs = [bench.ask(max_tokens=2) for _ in range(12)]
        assert all(bench.ended(job).state == "succeeded" for job in jobs)
    firsts = [step for step in bench.engine.steps if step in (("answer", "0"), ("prefill", "job-long"))]
    assert [kind for kind, _ in firsts].count("answer") == 12
    runs = [len(list(same)) for kind, same in itertools.groupby(kind for kind, _ in firsts) if kind == "answer"]
    assert max(runs) <= 3, "the prefill has a step as soon as a turn's time for questions is used up"


def test_what_one_worker_has_no_time_for_is_left_to_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reading = threading.Event(), threading.Event()
    step = FakeAnswer.step

    def held(answer: FakeAnswer) -> AnswerDelta:
        reading.set()
        assert gate.wait(20)
        return step(answer)

    monkeypatch.setattr(FakeAnswer, "step", held)
    jobs = [bench.ask() for _ in range(4)]
    with bench.working():
        assert reading.wait(20)
        states = [bench.queue.get(job).state for job in jobs]
        gate.set()
        assert all(bench.ended(job).state == "succeeded" for job in jobs)
    assert states == ["running", "queued", "queued", "queued"]


def test_answers_prefill_goes_before_a_prefill_job(bench: Bench) -> None:
    bench.add_document("slow", "SLOW")
    bench.add_document("cold", "text " * 1000, prefill=False)
    with bench.working():
        until(lambda: running(bench, "job-slow"))
        assert bench.ended(bench.ask("cold")).state == "succeeded"
        assert bench.queue.get("job-slow").state == "running"


def test_questions_that_wait_for_a_prefill_keep_no_warm_one_waiting(bench: Bench) -> None:
    bench.add_document("warm", "text")
    bench.add_document("evicted", LONG, prefill=False)
    with bench.working():
        bench.ended("job-warm")
        waiting = [bench.ask("evicted") for _ in range(MAX_ANSWERS + 2)]
        until(lambda: all(running(bench, job) for job in waiting))
        assert bench.ended(bench.ask("warm")).state == "succeeded"
        assert all(bench.queue.get(job).state == "running" for job in waiting), "they still wait for their KV"


def test_no_more_answers_take_turns_than_there_is_room_for(bench: Bench) -> None:
    bench.add_document("evicted", "text " * 500, prefill=False)
    with bench.working():
        jobs = [bench.ask("evicted", question="STORY", max_tokens=5) for _ in range(MAX_ANSWERS + 4)]
        assert all(bench.ended(job).state == "succeeded" for job in jobs)
    assert bench.engine.most_answering == MAX_ANSWERS


def test_long_answers_of_one_tenant_keep_no_others_waiting(bench: Bench) -> None:
    with bench.working():
        flood = [bench.ask(question="STORY", tenant="flood") for _ in range(MAX_ANSWERS + 2)]
        until(lambda: sum(bench.queue.get(job).state == "running" for job in flood) == MAX_ANSWERS)
        assert bench.ended(bench.ask(tenant="other")).state == "succeeded"
        assert sum(bench.queue.get(job).state == "running" for job in flood) == MAX_ANSWERS
        assert bench.engine.most_answering == MAX_ANSWERS + 1


def test_last_attempt_runs_alone(bench: Bench) -> None:
    bench.add_document("slow", "SLOW")
    bench.add_document("risky", "text", max_attempts=3)
    with bench.working() as scheduler:
        until(lambda: running(bench, "job-slow"))
        bench.ended("job-risky")
        assert not scheduler.alone.is_set()
    bench.queue.cancel("job-slow")
    bench.engine.steps.clear()

    bench.add_document("again", "SLOW", max_attempts=3)
    for _ in range(2):  # as if two workers had died with it
        job = bench.queue.claim("victim", ["prefill"], lease_s=-1)
        assert job is not None
        bench.queue.reclaim()
    story = bench.ask(question="STORY", max_tokens=10)
    with bench.working() as scheduler:
        until(lambda: running(bench, "job-again"))
        assert scheduler.alone.is_set()
        assert bench.queue.get(story).state == "succeeded", "what ran before it was finished first"
        later = bench.ask()
        bench.ended("job-again")
        bench.ended(later)
        assert bench.engine.steps[-1][0] == "answer"
    kinds = "".join(kind[0] for kind, _ in bench.engine.steps)
    assert "pa" not in kinds[: kinds.rindex("p")], "nothing ran beside it"


# --- cancel, delete, lost leases -------------------------------------------------------------------------------


def test_cancelled_prefill_stops_within_a_step_or_two(bench: Bench) -> None:
    bench.add_document("long", LONG)
    with bench.working():
        until(lambda: running(bench, "job-long"))
        bench.queue.cancel("job-long")
        steps = len(bench.engine.steps)
        until(lambda: bench.engine.prefills[0].ended)
        assert (len(bench.engine.steps) - steps) * STEP_S <= 0.25  # it looks each 0.05 s
        assert bench.engine.prefills[0].ended == "cancelled"
        assert bench.documents.file("t", "file-long").status == "error"
        assert bench.ended(bench.ask()).state == "succeeded"


def test_cancelled_answer_lets_go_of_its_kv(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(FakeAnswer, "close", lambda answer: closed.append(True))
    with bench.working():
        job_id = bench.ask(question="STORY")
        until(lambda: bench.text(job_id))
        bench.queue.cancel(job_id)
        until(lambda: closed)
        steps = len(bench.engine.steps)
        bench.ended(bench.ask())
        assert len(bench.engine.steps) == steps + 3


def test_prefill_that_an_answer_waits_for_outlives_its_own_job(bench: Bench) -> None:
    bench.add_document("slow", "SLOW")
    with bench.working():
        until(lambda: running(bench, "job-slow"))
        answer = bench.ask("slow")
        until(lambda: bench.queue.get(answer).progress > 0)
        bench.queue.cancel("job-slow")
        assert bench.ended(answer).state == "succeeded"
    assert len(bench.engine.prefills) == 1


def test_prefill_goes_on_when_an_answer_that_waited_is_cancelled(bench: Bench) -> None:
    bench.add_document("slow", "SLOW")
    with bench.working():
        until(lambda: running(bench, "job-slow"))
        answer = bench.ask("slow")
        until(lambda: bench.queue.get(answer).progress > 0)
        bench.queue.cancel(answer)
        assert bench.ended("job-slow").state == "succeeded"
    assert len(bench.engine.prefills) == 1


def test_cold_prefill_that_nobody_waits_for_any_more_stops(bench: Bench) -> None:
    bench.add_document("long", LONG, prefill=False)
    with bench.working():
        answer = bench.ask("long")
        until(lambda: bench.queue.get(answer).progress > 0)
        bench.queue.cancel(answer)
        until(lambda: bench.engine.prefills[0].ended == "cancelled")


def test_lost_lease_stops_the_work_and_leaves_the_job_to_others(bench: Bench) -> None:
    bench.add_document("long", LONG)
    with bench.working():
        until(lambda: running(bench, "job-long"))
        with bench.database.write(durable=False) as connection:
            connection.execute("UPDATE jobs SET lease_until = 0")
        assert bench.queue.reclaim() == 1
        taken = bench.queue.claim("other", ["prefill"], lease_s=60)
        if taken is None:  # the bench's own scheduler took it back: that is another attempt as well
            until(lambda: bench.queue.get("job-long").attempts == 2)
        else:
            until(lambda: bench.engine.prefills[0].ended)
            assert bench.queue.get("job-long").epoch == taken.epoch


def test_document_deleted_during_the_last_step_leaves_no_kv(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.add_document("a", "text")
    step = FakePrefill.step

    def deletes_last(prefill: FakePrefill) -> bool:
        more = step(prefill)
        if not more:
            bench.documents.delete_file("t", "file-a")
        return more

    monkeypatch.setattr(FakePrefill, "step", deletes_last)
    garbage: list[str] = []
    with bench.working():
        until(lambda: bench.engine.prefills and bench.engine.prefills[0].done == LAYERS)
    bench.documents.collect(lambda piece: garbage.append(piece.name))
    assert garbage.count("doc-a:default") == 2  # of the deletion, and of the KV that came behind it
    assert bench.queue.get("job-a").state == "cancelled"


# --- errors ----------------------------------------------------------------------------------------------------


def test_broken_job_takes_no_other_along(bench: Bench) -> None:
    bench.add_document("bad", "RAISE", max_attempts=2)
    bench.add_document("good", "text")
    with bench.working():
        story = bench.ask(question="STORY", max_tokens=60)
        bad = bench.ended("job-bad")
        assert bench.ended("job-good").state == "succeeded"
        assert bench.ended(story).state == "succeeded"
    assert (bad.state, bad.attempts) == ("dead", 2)
    assert bench.kv.discarded == ["job-bad"]
    assert bad.error == {"code": "internal_error", "message": "the worker failed with RuntimeError"}
    assert bench.documents.file("t", "file-bad").error == bad.error


def test_permanent_errors_are_not_tried_again(bench: Bench) -> None:
    bench.add_document("full", "FULL")
    with bench.working():
        job = bench.ended("job-full")
        gone = bench.ended(bench.ask("nowhere"))
        stranger = bench.ended(bench.ask("full", tenant="stranger"))
        long = bench.ended(bench.ask(question="x" * 70_000))
    assert (job.state, job.attempts) == ("failed", 1)
    assert job.error is not None
    assert job.error["code"] == "storage_full"
    assert "1000" in job.error["message"]
    assert gone.error is not None
    assert gone.error["code"] == "document_deleted"
    assert stranger.error is not None
    assert stranger.error["code"] == "document_deleted"
    assert long.error is not None
    assert long.error["code"] == "context_length_exceeded"


def test_prefill_of_tokens_that_another_tokenizer_made_is_refused(bench: Bench) -> None:
    bench.add_document("a", "text")
    with bench.database.write(durable=False) as connection:
        connection.execute("UPDATE documents SET tokenizer_digest = 'other'")
    with bench.working():
        job = bench.ended("job-a")
    assert job.error is not None
    assert (job.state, job.error["code"]) == ("failed", "tokenizer_changed")


def test_kv_that_always_vanishes_ends_the_answer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.add_document("a", "text", prefill=False)
    monkeypatch.setattr(bench.engine, "cached_tokens", lambda tokens, salt, fidelity: 0)
    with bench.working():
        job = bench.ended(bench.ask("a", max_attempts=1))
    assert job.error is not None
    assert job.error["code"] == "kv_missing"
    assert len(bench.engine.prefills) == 3


def test_broken_device_ends_the_worker_and_keeps_the_other_jobs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.add_document("a", "text")

    def broken(prefill: FakePrefill) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(FakePrefill, "step", broken)
    story = bench.ask(question="STORY")
    with pytest.raises(EngineBroken), bench.working():
        until(lambda: bench.queue.get("job-a").attempts == 1 and bench.queue.get("job-a").state == "queued")
    assert bench.queue.get(story).state == "queued"


def test_store_that_is_away_for_a_while(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.scheduler.UNAVAILABLE_S", 0.01)
    bench.add_document("slow", "SLOW")
    claim, refusals = bench.queue.claim, []

    def refuse(worker: str, kinds: list[JobKind], *, lease_s: float, **which: Any) -> Job | None:
        if running(bench, "job-slow") and len(refusals) < 5:
            refusals.append(1)
            raise DatabaseUnavailable("database or disk is full")
        return claim(worker, kinds, lease_s=lease_s, **which)

    monkeypatch.setattr(bench.queue, "claim", refuse)
    with bench.working():
        assert bench.ended("job-slow").state == "succeeded"
    assert len(refusals) == 5
    assert bench.queue.get("job-slow").attempts == 1


# --- end of the worker -----------------------------------------------------------------------------------------


def test_stop_suspends_and_the_next_worker_goes_on(bench: Bench) -> None:
    bench.add_document("slow", "SLOW")
    with bench.working():
        until(lambda: running(bench, "job-slow"))
        story = bench.ask(question="STORY")
        until(lambda: bench.text(story))
    first = bench.engine.prefills[0]
    assert first.ended == "suspended"
    job = bench.queue.get("job-slow")
    assert (job.state, job.attempts) == ("queued", 0)
    assert bench.queue.get(story).state == "queued"
    with bench.working():
        bench.queue.cancel(story)
        assert bench.ended("job-slow").state == "succeeded"
    assert bench.engine.prefills[1].resumed_from >= first.done
    assert bench.sample("foreword_prefills_resumed_total") == 1
