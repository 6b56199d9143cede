"""Waiting for documents: what still has to be done before a question about them can be answered."""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import anyio
from anyio import to_thread

from service.dependencies import Services
from service.documents.base import DocumentRecord, FileRecord, Json, UnknownRecord
from service.errors import ApiError, DocumentFailed, InvalidRequest, NotFound
from service.intake import find_file
from service.queue.base import UnknownJob
from service.sse import HEARTBEAT_S

# A prefill may report many times a second; those who wait look no more often than this.
LOOK_S = 0.2


@dataclass(frozen=True)
class Stage:
    """What is being done now: ingest, prefill or answer; `progress` 0–1, None while it is queued."""

    name: str
    progress: float | None = None
    eta_s: float | None = None

    def __str__(self) -> str:
        return f"{self.name} waiting" if self.progress is None else f"{self.name} {self.progress:.0%}"


@dataclass(frozen=True)
class ReadyFile:
    file: FileRecord
    document: DocumentRecord


@dataclass(frozen=True)
class Unready:
    job_id: str
    stage: str


def look(services: Services, tenant: str, file_ids: Sequence[str]) -> list[ReadyFile] | Unready:
    """The documents behind these handles, each once, or the job that the first unready one waits for.

    Only the first document's own prefill is waited for: the KV of those behind it depends on what stands before them.
    Raises NotFound, InvalidRequest (a file that is only stored), DocumentFailed (also where the model has changed to
    one that reads other tokens).
    """
    ready: list[ReadyFile] = []
    for file_id in file_ids:
        file = find_file(services, tenant, file_id)
        if file is None:
            raise NotFound(f"No such File object: {file_id}", param="messages", code="file_not_found")
        if file.purpose in ("batch", "batch_output"):
            raise InvalidRequest(
                f"{file_id} has purpose {file.purpose!r}, which is only stored; 'user_data' is expected",
                param="messages",
            )
        if file.document_id is None:
            if file.status == "error" or file.ingest_job is None:
                raise failed(file)
            return Unready(file.ingest_job, "ingest")
        if not ready and file.status != "processed":
            if file.status == "error":
                raise failed(file)
            if (job_id := prefill_job(services, file)) is not None:
                return Unready(job_id, "prefill")
        if all(other.document.id != file.document_id for other in ready):
            document = services.documents.document(file.document_id)
            if document.tokenizer_digest != services.model.prompts.tokenizer.digest:
                raise DocumentFailed(
                    f"{file.id} ({file.filename}) was read with another model's tokenizer: upload it again",
                    code="tokenizer_changed",
                    param="messages",
                )
            ready.append(ReadyFile(file, document))
    return ready


async def wait_for_documents(
    services: Services, tenant: str, file_ids: Sequence[str]
) -> AsyncGenerator[Stage | list[ReadyFile], None]:
    """Stages at least every HEARTBEAT_S, then the documents. Raises what `look` raises."""
    seq: dict[str, int] = {}
    while True:
        state = await to_thread.run_sync(look, services, tenant, file_ids)
        if not isinstance(state, Unready):
            yield state
            return
        yield await to_thread.run_sync(stage_of, services, state)
        looked_at = time.monotonic()
        after = seq.get(state.job_id, 0)
        try:
            events = await services.queue.events_async(state.job_id, after, timeout_s=HEARTBEAT_S)
        except UnknownJob:
            events = []
        if events:
            seq[state.job_id] = events[-1].seq
        if not events or events[-1].type != "done":
            await anyio.sleep(max(0.0, LOOK_S - (time.monotonic() - looked_at)))


def stage_of(services: Services, unready: Unready) -> Stage:
    """How far its job has come."""
    try:
        job = services.queue.get(unready.job_id)
    except UnknownJob:
        return Stage(unready.stage)
    if job.state == "queued":
        return Stage(unready.stage)
    return Stage(unready.stage, job.progress, job.detail.get("eta_s"))


def prefill_job(services: Services, file: FileRecord) -> str | None:
    """The unfinished job that makes this file's KV, if there is one."""
    try:
        prefill = services.documents.prefill(f"{file.document_id}:{file.fidelity}")
    except UnknownRecord:
        return None
    return prefill.job_id if prefill.state in ("queued", "running") else None


def failed(file: FileRecord) -> ApiError:
    """Why this file can't be asked about."""
    error: Json = file.error or {}
    message = error.get("message") or file.status_details or "it could not be processed"
    return DocumentFailed(f"{file.id} ({file.filename}): {message}", code=error.get("code"), param="messages")
