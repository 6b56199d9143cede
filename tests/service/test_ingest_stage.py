"""The ingest stage: what it commits, and that nothing else is left behind."""

import dataclasses
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.resume import ResumeFolder
from service.housekeeping import SLOW_TICKS, Housekeeper
from service.ingest.base import IngestError, IngestSummary, Source
from service.queue.base import Effects, Job, LeaseLost, NewJob, RecordChange
from service.stages.ingest import QUESTION_TOKENS, IngestJob, IngestLoop, Stopping, document_id_of
from tests.contracts.documents_contract import file_record
from tests.service.bench import Bench, until


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


class FakeIngest:
    """Content is what the sources say; `during` runs in the middle of it."""

    def __init__(self, during: Callable[[Path], None] = lambda path: None) -> None:
        self.during = during
        self.calls: list[dict[str, Any]] = []

    def __call__(self, sources: Sequence[Source], out_dir: Path, **options: Any) -> IngestSummary:
        self.calls.append({"sources": sources, "out_dir": out_dir, **options})
        out_dir.mkdir(parents=True)
        text = "".join(source.path.read_text() for source in sources)
        self.during(out_dir)
        options["progress"](0.5, "a.txt")
        np.save(out_dir / "tokens.npy", np.arange(len(text), dtype=np.uint32))
        return IngestSummary("doc", f"hash of {text}", "s", len(text), 1, 0, len(text), 0.01)


def put_file(bench: Bench, file_id: str, text: str = "hello", **fields: Any) -> Job:
    path = bench.settings.data_dir / "uploads" / file_id / "0"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    source = {"filename": "a.txt", "path": f"uploads/{file_id}/0"}
    record = dataclasses.asdict(file_record(file_id, sources=[source], ingest_job=f"ingest-{file_id}", **fields))
    payload = {"file_id": file_id, "upload_seconds": 0.1, "request_id": "req-1"}
    new = NewJob("ingest", "t", payload, job_id=f"ingest-{file_id}")
    bench.queue.put(new, Effects([RecordChange("files", file_id, record)]))
    job = bench.queue.claim("bench", ["ingest"], lease_s=30)
    assert job is not None
    bench.leases.hold(job)
    return job


def run(bench: Bench, job: Job, ingest: FakeIngest, **options: Any) -> None:
    IngestJob(bench.context, job, ingest, Path("tokenizer.json"), **options).run()


def folders(bench: Bench) -> list[str]:
    return sorted(path.name for path in (bench.settings.data_dir / "documents").glob("*"))


def test_document_handle_and_prefill_job_come_together(bench: Bench) -> None:
    run(bench, put_file(bench, "file-1", priority=3, fidelity="strict", created_at=7.0), FakeIngest())
    file = bench.documents.file("t", "file-1")
    digest = bench.context.prompts.tokenizer.digest
    assert file.document_id == document_id_of("t", "hash of hello", digest)
    assert file.status == "uploaded"
    document = bench.documents.document(file.document_id)
    assert (document.num_tokens, document.stage_seconds) == (5, {"upload": 0.1, "ingest": 0.01})
    assert (bench.settings.data_dir / document.folder / "tokens.npy").is_file()
    job = bench.queue.claim("w", ["prefill"], lease_s=30)
    assert job is not None
    assert job.priority == 3
    assert job.payload == {
        "document_id": file.document_id,
        "fidelity": "strict",
        "uploaded_at": 7.0,
        "ingest_seconds": 0.01,
        "request_id": "req-1",
    }
    assert bench.documents.prefill(f"{file.document_id}:strict").job_id == job.id


def test_documents_of_two_tenants_or_tokenizers_differ() -> None:
    ids = {document_id_of(*parts) for parts in [("a", "c", "d"), ("b", "c", "d"), ("a", "c", "e"), ("ac", "", "d")]}
    assert len(ids) == 4


def test_document_deleted_while_its_content_is_ingested_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run(bench, put_file(bench, "file-1"), FakeIngest())
    with bench.working():
        until(lambda: bench.documents.file("t", "file-1").status == "processed")
    job = put_file(bench, "file-2")
    finish = bench.queue.finish

    def deletes_first(*args: Any) -> None:
        bench.documents.delete_file("t", "file-1")
        finish(*args)

    monkeypatch.setattr(bench.queue, "finish", deletes_first)
    run(bench, job, FakeIngest())
    monkeypatch.undo()
    with bench.working():
        until(lambda: bench.documents.file("t", "file-2").status == "processed")


def test_identical_content_reuses_document_and_prefill(bench: Bench) -> None:
    run(bench, put_file(bench, "file-1"), FakeIngest())
    with bench.working():
        until(lambda: bench.documents.file("t", "file-1").status == "processed")
    run(bench, put_file(bench, "file-2", pinned=True), FakeIngest())
    first, second = (bench.documents.file("t", name) for name in ("file-1", "file-2"))
    assert second.document_id == first.document_id
    assert second.status == "processed"
    assert bench.queue.counts() == {"succeeded": 3}
    assert folders(bench) == ["ingest-file-1.1"]
    assert bench.kv.policies[f"{first.document_id}:default"] == (None, True)


def test_kv_of_another_model_is_made_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run(bench, put_file(bench, "file-1"), FakeIngest())
    with bench.working():
        until(lambda: bench.documents.file("t", "file-1").status == "processed")
    monkeypatch.setattr(bench.engine, "digest", lambda fidelity: "another")
    run(bench, put_file(bench, "file-2"), FakeIngest())
    assert bench.documents.file("t", "file-2").status == "uploaded"
    assert bench.queue.counts()["queued"] == 1


def test_too_long_document_says_both_numbers(bench: Bench) -> None:
    reserved = bench.context.prompts.prefix_length([0]) + QUESTION_TOKENS + bench.settings.max_tokens_default
    most = bench.engine.max_positions - reserved
    job = put_file(bench, "file-1", "x" * (most + 1))
    ingest = FakeIngest()
    loop_once(bench, job, ingest)
    assert ingest.calls[0]["limits"].max_tokens == most
    error = bench.documents.file("t", "file-1").error
    assert error is not None
    assert error["code"] == "context_length_exceeded"
    assert f"{most + 1} tokens" in error["message"]
    assert str(most) in error["message"]
    assert folders(bench) == []
    run(bench, put_file(bench, "file-2", "x" * most), FakeIngest())


def loop_once(bench: Bench, job: Job, ingest: FakeIngest) -> None:
    """Let the loop itself take the job, errors and all."""
    bench.leases.drop(job)
    bench.queue.release(job)
    paused, busy = threading.Event(), threading.Event()
    loop = IngestLoop(bench.context, "w", ingest, tokenizer_file=Path("tokenizer.json"), paused=paused, busy=busy)
    loop.start()
    bench.ended(job.id)
    loop.close()


def test_ingest_error_is_the_files_error(bench: Bench) -> None:
    def refuse(path: Path) -> None:
        raise IngestError("archive_bomb", "it unpacks to 9 TB, 4 GB are allowed")

    loop_once(bench, put_file(bench, "file-1"), FakeIngest(refuse))
    file = bench.documents.file("t", "file-1")
    assert (file.status, file.error) == (
        "error",
        {"code": "archive_bomb", "message": "it unpacks to 9 TB, 4 GB are allowed"},
    )
    assert folders(bench) == []


def test_cancelled_ingest_leaves_nothing(bench: Bench) -> None:
    def deleted(path: Path) -> None:
        bench.documents.delete_file("t", "file-1")
        bench.leases._looked_at["ingest-file-1"] = 0.0

    with pytest.raises(LeaseLost):
        run(bench, put_file(bench, "file-1"), FakeIngest(deleted))
    assert folders(bench) == []
    assert bench.queue.get("ingest-file-1").state == "cancelled"


def test_stopping_worker_releases_its_ingest(bench: Bench) -> None:
    job = put_file(bench, "file-1")
    with pytest.raises(Stopping):
        run(bench, job, FakeIngest(), stopping=lambda: True)
    bench.leases.drop(job)
    bench.queue.release(job)
    waiting, release = threading.Event(), threading.Event()

    def hold(path: Path) -> None:
        waiting.set()
        release.wait(10)

    paused, busy = threading.Event(), threading.Event()
    loop = IngestLoop(
        bench.context, "w", FakeIngest(hold), tokenizer_file=Path("tokenizer.json"), paused=paused, busy=busy
    )
    loop.start()
    assert waiting.wait(10)
    assert busy.is_set()
    threading.Timer(0.1, release.set).start()
    loop.close()
    assert (bench.queue.get(job.id).state, bench.queue.get(job.id).attempts) == ("queued", 0)


def test_paused_loop_takes_nothing(bench: Bench) -> None:
    job = put_file(bench, "file-1")
    bench.leases.drop(job)
    bench.queue.release(job)
    paused, busy = threading.Event(), threading.Event()
    paused.set()
    loop = IngestLoop(bench.context, "w", FakeIngest(), tokenizer_file=Path("x"), paused=paused, busy=busy)
    loop.start()
    loop._stop.wait(0.3)
    assert bench.queue.get(job.id).state == "queued"
    paused.clear()
    assert bench.ended(job.id).state == "succeeded"
    loop.close()


def test_base_gives_its_manifest(bench: Bench) -> None:
    run(bench, put_file(bench, "file-1"), FakeIngest())
    ingest = FakeIngest()
    run(bench, put_file(bench, "file-2", "other", base="file-1"), ingest)
    folder = bench.documents.document(bench.documents.file("t", "file-1").document_id or "").folder
    assert ingest.calls[0]["base_manifest"] == bench.settings.data_dir / folder / "manifest.json"
    gone = FakeIngest()
    run(bench, put_file(bench, "file-3", "third", base="file-9"), gone)
    assert gone.calls[0]["base_manifest"] is None


# --- housekeeping ----------------------------------------------------------------------------------------------


def housekeeper(bench: Bench) -> Housekeeper:
    return Housekeeper(bench.context, bench.documents, bench.kv)


def test_expired_handle_takes_bytes_folder_and_kv_along(bench: Bench) -> None:
    run(bench, put_file(bench, "file-1", expires_at=1.0), FakeIngest())
    run(bench, put_file(bench, "file-2", "other"), FakeIngest())
    document_id = bench.documents.file("t", "file-1").document_id
    keeper = housekeeper(bench)
    for _ in range(5):
        keeper.tick()
    assert [file.id for file in bench.documents.files("t", limit=9, after=None, order="asc", purpose=None)] == [
        "file-2"
    ]
    assert folders(bench) == ["ingest-file-2.1"]
    assert [path.name for path in (bench.settings.data_dir / "uploads").iterdir()] == ["file-2"]
    assert bench.kv.released == [f"{document_id}:default"]


def test_orphaned_folders_go_at_the_start_and_running_ones_stay(bench: Bench) -> None:
    run(bench, put_file(bench, "file-1"), FakeIngest())
    running = put_file(bench, "file-2", "other")
    root = bench.settings.data_dir / "documents"
    for name in ("ingest-file-2.1", "ingest-file-2.0", "ingest-file-9.1"):
        (root / name).mkdir()
    assert running.epoch == 1
    assert housekeeper(bench).sweep_orphans() == 2
    assert folders(bench) == ["ingest-file-1.1", "ingest-file-2.1"]


def test_reclaimed_jobs_are_counted(bench: Bench) -> None:
    bench.queue.put(NewJob("answer", "t", {}))
    bench.queue.claim("gone", ["answer"], lease_s=-1)
    housekeeper(bench).tick()
    assert bench.sample("foreword_lease_reclaims_total") == 1


def test_old_resume_points_are_swept_while_nothing_is_prefilled(bench: Bench) -> None:
    folder = bench.settings.data_dir / "resume"
    folder.mkdir()
    old, fresh = folder / "old.resume", folder / "fresh.resume"
    for file in (old, fresh):
        file.write_bytes(b"x" * 100)
    resume = ResumeFolder(folder, cap_bytes=1 << 20, idle_ttl_s=3600)
    keeper = Housekeeper(bench.context, bench.documents, bench.kv, resume)
    os.utime(old, (time.time() - 7200,) * 2)
    for _ in range(SLOW_TICKS):
        assert old.exists()
        keeper.tick()
    assert (old.exists(), fresh.exists()) == (False, True)


def test_what_a_killed_prefill_left_goes_with_its_job(bench: Bench) -> None:
    resume = ResumeFolder(bench.settings.data_dir / "resume", cap_bytes=1 << 30)
    cancelled, waiting = (bench.queue.put(NewJob("prefill", "t", {})).id for _ in range(2))
    for owner in (cancelled, waiting, "ask:of the command line"):
        file = resume.open(owner, key="ab" * 32, hidden_bytes=100)
        assert file is not None
        file.close()  # as by a kill
    at_work = resume.open("at work", key="ab" * 32, hidden_bytes=100)
    bench.queue.cancel(cancelled)
    keeper = Housekeeper(bench.context, bench.documents, bench.kv, resume)
    keeper.forget_unfinished()
    assert resume.unfinished() == {waiting, "ask:of the command line"}
    assert at_work is not None
    at_work.close()
    assert resume.unfinished() == {waiting, "ask:of the command line", "at work"}


def test_missing_upload_is_an_error_not_a_crash(bench: Bench) -> None:
    job = put_file(bench, "file-1")
    shutil.rmtree(bench.settings.data_dir / "uploads" / "file-1")
    loop_once(bench, job, FakeIngest())
    file = bench.documents.file("t", "file-1")
    assert file.error is not None
    assert file.error["code"] == "io_error"
