"""Records as users see them."""

from collections.abc import Callable, Sequence
from typing import Any

from service.dependencies import Services
from service.documents.base import DocumentRecord, FileRecord, Json, PrefillRecord, UnknownRecord
from service.intake import has_expired
from service.queue.base import Job, UnknownJob


def file_view(file: FileRecord) -> dict[str, Any]:
    """A file in the OpenAI shape, with what we know beside it under `foreword`."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": int(file.created_at),
        "expires_at": None if file.expires_at is None else int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": file.status,
        "status_details": file.status_details,
        "foreword": {
            "kind": file.kind,
            "fidelity": file.fidelity,
            "priority": file.priority,
            "base": file.base,
            "pin": file.pinned,
            "kv_ttl_s": file.kv_ttl_s,
            "document_id": file.document_id,
            "error": file.error,
        },
    }


def page(records: Sequence[FileRecord], view: Callable[[FileRecord], dict[str, Any]], *, limit: int) -> dict[str, Any]:
    """A page in the OpenAI shape; there is another if `records` hold more than `limit`. Expired ones are left out."""
    data = [view(record) for record in records[:limit] if not has_expired(record)]
    return {
        "object": "list",
        "data": data,
        "has_more": len(records) > limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def document_view(services: Services, file: FileRecord) -> dict[str, Any]:
    """Everything known about a handle's document: how far it is, what it cost, where its KV lies."""
    document = _document(services, file)
    prefill = _prefill(services, file)
    job = _job(services, file, prefill)
    state = _state(file, prefill)
    stages = dict(document.stage_seconds) if document else {}
    if prefill and prefill.seconds is not None:
        stages["prefill"] = prefill.seconds
    running = job is not None and job.state in ("queued", "running") and state in ("ingest", "prefill")
    return {
        "id": file.id,
        "object": "document",
        "document_id": file.document_id,
        "filename": file.filename,
        "purpose": file.purpose,
        "bytes": file.size_bytes,
        "created_at": int(file.created_at),
        "expires_at": None if file.expires_at is None else int(file.expires_at),
        "kind": file.kind,
        "priority": file.priority,
        "base": file.base,
        "status": file.status,
        "state": state,
        "job": None if job is None or not running else {"id": job.id, "state": job.state, "attempts": job.attempts},
        "progress": job.progress if job and running else 1.0 if state == "ready" else 0.0,
        "eta_s": job.detail.get("eta_s") if job and running else None,
        "detail": dict(job.detail) if job and running else {},
        "error": _error(file, prefill),
        "stage_seconds": stages,
        "num_tokens": document.num_tokens if document else None,
        "content_hash": document.content_hash if document else None,
        "stream_hash": document.stream_hash if document else None,
        "fidelity": file.fidelity,
        "density": prefill.density if prefill else None,
        "recall": prefill.recall if prefill else None,
        "heads": prefill.heads if prefill else None,
        "prefix_tokens": prefill.num_tokens if prefill else None,
        "cached_tokens": prefill.cached_tokens if prefill else None,
        "layers_recomputed": prefill.layers_recomputed if prefill else None,
        "cold_ttft_s": prefill.cold_ttft_s if prefill else None,
        **_kv(services, prefill),
        "kv_ttl_s": file.kv_ttl_s,
        "pin": file.pinned,
    }


def recall_view(services: Services, file: FileRecord, document: DocumentRecord) -> dict[str, Any]:
    """What each segment's attention kept, by the tokens that the manifest counts."""
    prefill, prompts = _prefill(services, file), services.model.prompts
    measured = prefill.segments if prefill and prefill.segments else []
    if prefill and prefill.num_tokens != prompts.prefix_length([document.num_tokens]):
        measured = []  # made with another template: nobody knows how far its tokens were shifted
    head, end = prompts.head_length, document.num_tokens
    data = [
        {
            "token_start": max(0, segment["start"] - head),
            "token_end": min(end, segment["end"] - head),
            "density": segment["density"],
            "recall": segment["mean"],
            "worst": segment["worst"],
        }
        for segment in measured
        if segment["end"] > head and segment["start"] - head < end
    ]
    return {"object": "list", "recall": prefill.recall if prefill else None, "data": data}


def _document(services: Services, file: FileRecord) -> DocumentRecord | None:
    if file.document_id is None:
        return None
    try:
        return services.documents.document(file.document_id)
    except UnknownRecord:  # deleted between two looks: that must not spoil a whole list
        return None


def _prefill(services: Services, file: FileRecord) -> PrefillRecord | None:
    if file.document_id is None:
        return None
    try:
        return services.documents.prefill(prefill_id(file))
    except UnknownRecord:
        return None


def prefill_id(file: FileRecord) -> str:
    """Name of the prefill that this handle stands for; also the holder of its KV."""
    return f"{file.document_id}:{file.fidelity}"


def _job(services: Services, file: FileRecord, prefill: PrefillRecord | None) -> Job | None:
    job_id = prefill.job_id if prefill else file.ingest_job
    if job_id is None:
        return None
    try:
        return services.queue.get(job_id)
    except UnknownJob:
        return None


def _state(file: FileRecord, prefill: PrefillRecord | None) -> str:
    """stored (purpose=batch) | ingest | prefill | ready | error"""
    if file.status == "error":
        return "error"
    if file.status == "processed":
        return "ready" if file.document_id is not None else "stored"
    return "prefill" if prefill is not None else "ingest"


def _error(file: FileRecord, prefill: PrefillRecord | None) -> Json | None:
    if file.status != "error":
        return None
    if file.error is not None:
        return file.error
    if prefill is not None and prefill.error is not None:
        return prefill.error
    return {"code": "document_failed", "message": file.status_details}


def _kv(services: Services, prefill: PrefillRecord | None) -> dict[str, Any]:
    """`kv`: none | stored | stale, and the bytes on each tier."""
    tiers = dict(services.kv_store.describe(prefill.id)) if prefill else {}
    stored = any(tiers.values())
    if prefill is None or not stored:
        return {"kv": "none", "kv_bytes": tiers}
    current = services.engine_digest(prefill.fidelity)
    stale = current is not None and prefill.digest is not None and current != prefill.digest
    return {"kv": "stale" if stale else "stored", "kv_bytes": tiers}
