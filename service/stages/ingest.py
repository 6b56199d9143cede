"""A claimed job of kind `ingest`: uploaded bytes into a document, then its prefill is queued, in one transaction."""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from engine.errors import InvalidRequest
from service.documents.base import FileRecord, UnknownRecord
from service.ingest.base import IngestLimits, IngestSummary, Kind, Source
from service.kv_policy import apply_kv_policy
from service.payloads import IngestPayload, PrefillPayload, origin_of
from service.queue.base import Effects, Job, LeaseLost, NewJob, QueueUnavailable, RecordChange
from service.stages.context import StageContext, logged
from service.stages.failures import failure_of
from service.stages.prefill import prefill_id

log = logging.getLogger(__name__)

IDLE_S = 0.5
PAUSED_S = 0.05
PROGRESS_S = 0.5
QUESTION_TOKENS = 256  # room kept for a question beside the answer's max_tokens


class Ingest(Protocol):
    """service.ingest.ingest."""

    def __call__(
        self,
        sources: Sequence[Source],
        out_dir: Path,
        *,
        kind: Kind,
        tokenizer_file: Path,
        limits: IngestLimits | None = None,
        base_manifest: Path | None = None,
        progress: Callable[[float, str], None] | None = None,
    ) -> IngestSummary: ...


class IngestLoop:
    """Takes one ingest after the other, in a thread of its own: a long prefill never holds up an upload."""

    def __init__(
        self,
        context: StageContext,
        worker: str,
        ingest: Ingest,
        *,
        tokenizer_file: Path,
        paused: threading.Event,
        busy: threading.Event,
    ) -> None:
        """`busy` is set while an ingest runs; none begins while `paused` is."""
        self._context = context
        self._worker = worker
        self._ingest = ingest
        self._tokenizer_file = tokenizer_file
        self._paused = paused
        self._busy = busy
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingest", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Let go of a running ingest; its job is released."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if not self._take_one():
                    self._stop.wait(PAUSED_S) if self._paused.is_set() else self._context.queue.wait(IDLE_S, ["ingest"])
            except QueueUnavailable as error:
                log.error("the job store is unavailable: %s", error)
                self._stop.wait(1.0)
            except Exception:  # the thread must outlive whatever it is
                log.exception("the ingest loop goes on after an error")
                self._stop.wait(1.0)

    def _take_one(self) -> bool:
        self._busy.set()  # before looking at `paused`: whoever sets that then looks at this
        try:
            if self._paused.is_set():
                return False
            job = self._context.queue.claim(self._worker, ["ingest"], lease_s=self._context.settings.lease_s)
            if job is None:
                return False
            self._context.leases.hold(job)
            self._context.claimed(job)
            with logged(job):
                self._do(job)
            return True
        finally:
            self._busy.clear()

    def _do(self, job: Job) -> None:
        context, started_at = self._context, self._context.clock()
        code: str | None = None
        try:
            IngestJob(context, job, self._ingest, self._tokenizer_file, stopping=self._stop.is_set).run()
            context.metrics.jobs_ended.labels("ingest", "succeeded").inc()
        except LeaseLost:
            code = "lease_lost"
            log.info("ingest was cancelled or taken over")
        except Stopping:
            code = "suspended"
            context.queue.release(job)
        except Exception as error:
            failure = failure_of(error)
            code = failure.error["code"]
            # The message is for the uploader alone: it may name what is in an archive, or quote it.
            log.warning("ingest failed: %s", code, exc_info=error if failure.retry else None)
            ended = context.queue.fail(job, failure.error, retry=failure.retry)
            context.metrics.job_failed("ingest", ended.state, code)
        finally:
            attributes = {"foreword.file.id": job.payload.get("file_id")}
            context.traces.stage(
                "ingest", job.payload.get("traceparent"), started_at, context.clock(), attributes, error=code
            )
            context.leases.drop(job)


class Stopping(Exception):
    """The worker is told to end."""


class IngestJob:
    def __init__(
        self,
        context: StageContext,
        job: Job,
        ingest: Ingest,
        tokenizer_file: Path,
        *,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._context = context
        self._job = job
        self._payload: IngestPayload = job.payload  # type: ignore[assignment]
        self._ingest = ingest
        self._tokenizer_file = tokenizer_file
        self._stopping = stopping
        self._reported_at = 0.0

    def run(self) -> None:
        """Raises IngestError, InvalidRequest, UnknownRecord, LeaseLost, Stopping, OSError."""
        context = self._context
        file = context.documents.file(self._job.tenant, self._payload["file_id"])
        # A folder an attempt: one that lost its lease may still be writing into its own.
        folder = Path("documents") / f"{self._job.id}.{self._job.epoch}" / "document"
        path = context.settings.files_dir / folder
        try:
            summary = self._ingest(
                [Source(context.settings.files_dir / source["path"], source["filename"]) for source in file.sources],
                path,
                kind=file.kind,  # type: ignore[arg-type]
                tokenizer_file=self._tokenizer_file,
                limits=IngestLimits(
                    memory_bytes=context.settings.ingest_memory_bytes,
                    timeout_s=context.settings.ingest_timeout_s,
                    max_tokens=self._most_tokens(),
                ),
                base_manifest=self._base_manifest(file),
                progress=self._progress,
            )
            self._check_length(summary.num_tokens)
            sync_folder(path)
            document_id = self._commit(file, summary, folder)
        except QueueUnavailable:
            raise  # whether it was committed nobody knows: if not, its folder is swept as an orphan
        except BaseException:
            shutil.rmtree(path.parent, ignore_errors=True)
            raise
        if context.documents.document(document_id).folder != str(folder):
            shutil.rmtree(path.parent, ignore_errors=True)  # this content was known already
        apply_kv_policy(context.documents, context.kv, document_id, file.fidelity)
        context.metrics.stage_seconds.labels("ingest").observe(summary.seconds)
        context.metrics.ingested_tokens.labels(summary.kind).inc(summary.num_tokens)
        log.info("ingested %d bytes into %d tokens in %.2f s", summary.input_bytes, summary.num_tokens, summary.seconds)

    def _commit(self, file: FileRecord, summary: IngestSummary, folder: Path) -> str:
        """Document, handle and prefill job together with the end of this one. Returns the document's id."""
        context, tenant = self._context, self._job.tenant
        document_id = document_id_of(tenant, summary.content_hash, context.prompts.tokenizer.digest)
        document = {
            "tenant": tenant,
            "content_hash": summary.content_hash,
            "stream_hash": summary.stream_hash,
            "tokenizer_digest": context.prompts.tokenizer.digest,
            "num_tokens": summary.num_tokens,
            "folder": str(folder),
            "created_at": context.clock(),
            "stage_seconds": {"upload": self._payload.get("upload_seconds"), "ingest": summary.seconds},
        }
        prefill = {"document_id": document_id, "tenant": tenant, "fidelity": file.fidelity}
        changes = [
            RecordChange("documents", document_id, document),
            RecordChange("prefills", prefill_id(document_id, file.fidelity), prefill),
            RecordChange("files", file.id, {"document_id": document_id}),
        ]
        put = [] if self._is_prefilled(document_id, file.fidelity) else [self._prefill_job(file, document_id, summary)]
        context.queue.finish(self._job, {"document_id": document_id, **summary.as_json()}, Effects(changes, put))
        if not put and not self._is_prefilled(document_id, file.fidelity):
            # Its other handles, and all that was made for them, were deleted since the look above.
            context.queue.put(self._prefill_job(file, document_id, summary))
        return document_id

    def _prefill_job(self, file: FileRecord, document_id: str, summary: IngestSummary) -> NewJob:
        payload: PrefillPayload = {
            "document_id": document_id,
            "fidelity": file.fidelity,
            "uploaded_at": file.created_at,
            "ingest_seconds": summary.seconds,
            **origin_of(self._payload),
        }
        return NewJob(
            "prefill",
            self._job.tenant,
            payload,
            priority=file.priority,
            cost_tokens=summary.num_tokens,
            max_attempts=self._context.settings.max_attempts,
            single_flight=prefill_id(document_id, file.fidelity),
        )

    def _is_prefilled(self, document_id: str, fidelity: str) -> bool:
        """By this model, that is; whether its KV has been evicted since is the next question's business."""
        try:
            record = self._context.documents.prefill(prefill_id(document_id, fidelity))
        except UnknownRecord:
            return False
        return record.state == "ready" and record.digest == self._context.engine.digest(fidelity)  # type: ignore[arg-type]

    def _most_tokens(self) -> int:
        """Document tokens that leave room for the prompt's frame, a question and its answer."""
        settings, prompts = self._context.settings, self._context.prompts
        reserved = prompts.prefix_length([0]) + QUESTION_TOKENS + settings.max_tokens_default
        room = self._context.engine.max_positions - reserved
        if room < 1:
            raise InvalidRequest(
                f"the model's {self._context.engine.max_positions} positions leave no room for a document beside the "
                f"{reserved} kept for question and answer"
            )
        return min(room, settings.max_document_tokens) if settings.max_document_tokens else room

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > (most := self._most_tokens()):
            raise TooManyTokens(num_tokens, most)

    def _base_manifest(self, file: FileRecord) -> Path | None:
        if file.base is None:
            return None
        try:
            base = self._context.documents.file(file.tenant, file.base)
            if base.document_id is None:
                return None
            return self._context.manifest(self._context.documents.document(base.document_id))
        except UnknownRecord:
            log.info("base %s is gone: the usual order is used", file.base)
            return None

    def _progress(self, fraction: float, note: str) -> None:
        """`note` may name what is in the archive: it is for the event, never for the log."""
        if self._stopping():
            raise Stopping
        context, now = self._context, self._context.clock()
        if not context.leases.holds(self._job):
            raise LeaseLost(f"job {self._job.id} is no longer held")
        if not 0 <= now - self._reported_at < PROGRESS_S:
            self._reported_at = now
            context.queue.progress(self._job, fraction, {"stage": "ingest", "eta_s": None, "note": note})


class TooManyTokens(InvalidRequest):
    code = "context_length_exceeded"

    def __init__(self, got: int, limit: int) -> None:
        super().__init__(f"the document has {got} tokens, of which at most {limit} leave room for question and answer")


def document_id_of(tenant: str, content_hash: str, tokenizer_digest: str) -> str:
    hasher = blake3()
    for part in (tenant, content_hash, tokenizer_digest):
        data = part.encode()
        hasher.update(len(data).to_bytes(4, "little") + data)
    return f"doc-{hasher.hexdigest()[:24]}"


def sync_folder(folder: Path) -> None:
    """Its files and names to disk, before a record promises them."""
    for path in [*folder.iterdir(), folder, folder.parent, folder.parent.parent]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
