"""The progress of a document as events: its ingest, then its prefill, each with the seq of its own log."""

import re
from collections.abc import AsyncGenerator
from typing import Any

from anyio import to_thread

from service.dependencies import Services
from service.documents.base import FileRecord, UnknownRecord
from service.errors import InvalidRequest
from service.intake import get_file
from service.queue.base import UnknownJob
from service.sse import KEEPALIVE_S, comment, event
from service.views import document_view, prefill_id

STAGES = ("ingest", "prefill")
_SEQ = re.compile(r"[0-9]{1,18}")  # what the store can compare with


def parse_event_id(last_event_id: str | None) -> tuple[str, int]:
    """(stage, seq) of the last event that a client saw, its ids being `<stage>:<seq>`. Raises InvalidRequest."""
    if not last_event_id:
        return STAGES[0], 0
    stage, _, seq = last_event_id.partition(":")
    if stage not in STAGES or not _SEQ.fullmatch(seq):
        raise InvalidRequest(
            f"'ingest:<number>' or 'prefill:<number>' is expected, got {last_event_id[:80]!r}", param="Last-Event-ID"
        )
    return stage, int(seq)


async def document_events(
    services: Services, tenant: str, file_id: str, last_event_id: str | None
) -> AsyncGenerator[str, None]:
    """Events behind `last_event_id`, then new ones until the document is ready or failed; the last is `document`."""
    first_stage, seq = parse_event_id(last_event_id)
    for stage in STAGES[STAGES.index(first_stage) :]:
        file = await to_thread.run_sync(get_file, services, tenant, file_id)
        job_id = await to_thread.run_sync(_job_id, services, file, stage)
        ended = job_id is None
        while not ended:
            assert job_id is not None
            try:
                events = await services.queue.events_async(job_id, seq, timeout_s=KEEPALIVE_S)
            except UnknownJob:  # finished so long ago that its log is gone
                break
            for item in events:
                seq, ended = item.seq, item.type == "done"
                yield event({"stage": stage, **item.data}, name=item.type, event_id=f"{stage}:{seq}")
            if not events:
                yield comment("waiting")
        seq = 0
    yield event(await to_thread.run_sync(_final_view, services, tenant, file_id), name="document")


def _job_id(services: Services, file: FileRecord, stage: str) -> str | None:
    if stage == "ingest":
        return file.ingest_job
    if file.document_id is None:
        return None
    try:
        return services.documents.prefill(prefill_id(file)).job_id
    except UnknownRecord:
        return None


def _final_view(services: Services, tenant: str, file_id: str) -> dict[str, Any]:
    return document_view(services, get_file(services, tenant, file_id))
