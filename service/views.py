"""Records as users see them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.model_folder import length_warning
from service.dependencies import Services
from service.documents.base import DocumentRecord, FileRecord, Json, PrefillRecord
from service.intake import has_expired
from service.queue.base import Job


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


def page(
    records: Sequence[FileRecord], views: Callable[[Sequence[FileRecord]], list[dict[str, Any]]], *, limit: int
) -> dict[str, Any]:
    """A page in the OpenAI shape; there is another if `records` hold more than `limit`. Expired ones are left out."""
    data = views([record for record in records[:limit] if not has_expired(record)])
    return {
        "object": "list",
        "data": data,
        "has_more": len(records) > limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def file_views(files: Sequence[FileRecord]) -> list[dict[str, Any]]:
    return [file_view(file) for file in files]


def document_view(services: Services, file: FileRecord) -> dict[str, Any]:
    """Everything known about a handle's document: how far it is, what it cost, where its KV lies."""
    return document_views(services, [file])[0]


def head_map(services: Services, file: FileRecord) -> Sequence[str] | None:
    """Of a handle's prefill: a string a layer, a letter a KV-head group. None where it is not known, or not yet."""
    prefill = services.documents.known_prefills([prefill_id(file)]).get(prefill_id(file))
    return (prefill.head_map or None) if prefill else None


def document_views(services: Services, files: Sequence[FileRecord]) -> list[dict[str, Any]]:
    """The same of many: the stores are asked as often as for one. What was deleted between two looks is left open."""
    read = [file for file in files if file.document_id is not None]
    documents = services.documents.known_documents({file.document_id for file in read if file.document_id is not None})
    prefills = services.documents.known_prefills({prefill_id(file) for file in read})
    jobs = services.queue.known({job for file in files if (job := _job_id(file, prefills)) is not None})
    kept = services.kv_store.describe(list(prefills)) if prefills else {}
    fidelities = {prefills[holder].fidelity for holder, tiers in kept.items() if any(tiers.values())}
    digests = {fidelity: services.engine_digest(fidelity) for fidelity in fidelities}
    return [
        _document_view(
            file,
            documents.get(file.document_id or ""),
            prefill := prefills.get(prefill_id(file)),
            jobs.get(_job_id(file, prefills) or ""),
            _kv(prefill, kept, digests),
            services.model.trained_tokens,
        )
        for file in files
    ]


def _document_view(
    file: FileRecord,
    document: DocumentRecord | None,
    prefill: PrefillRecord | None,
    job: Job | None,
    kv: Json,
    trained_tokens: int | None,
) -> dict[str, Any]:
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
        "warnings": _warnings(document, trained_tokens),
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
        **kv,
        "kv_ttl_s": file.kv_ttl_s,
        "pin": file.pinned,
    }


def _warnings(document: DocumentRecord | None, trained_tokens: int | None) -> list[dict[str, str]]:
    message = length_warning(document.num_tokens, trained_tokens) if document else None
    return [] if message is None else [{"code": "longer_than_trained", "message": message}]


def recall_view(services: Services, file: FileRecord, document: DocumentRecord) -> dict[str, Any]:
    """What each segment's attention kept, by the tokens that the manifest counts."""
    prefill = services.documents.known_prefills([prefill_id(file)]).get(prefill_id(file))
    prompts = services.model.prompts
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


def prefill_id(file: FileRecord) -> str:
    """Name of the prefill that this handle stands for; also the holder of its KV."""
    return f"{file.document_id}:{file.fidelity}"


def _job_id(file: FileRecord, prefills: Mapping[str, PrefillRecord]) -> str | None:
    """The job that is, or was last, at work for this handle."""
    prefill = prefills.get(prefill_id(file))
    return prefill.job_id if prefill else file.ingest_job


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


def _kv(
    prefill: PrefillRecord | None, kept: Mapping[str, Mapping[str, int]], digests: Mapping[str, str | None]
) -> dict[str, Any]:
    """`kv`: none | stored | stale, and the bytes on each tier. `digests`: the engine's now, by fidelity."""
    tiers = dict(kept.get(prefill.id, {})) if prefill else {}
    stored = any(tiers.values())
    if prefill is None or not stored:
        return {"kv": "none", "kv_bytes": tiers}
    current = digests[prefill.fidelity]
    stale = current is not None and prefill.digest is not None and current != prefill.digest
    return {"kv": "stale" if stale else "stored", "kv_bytes": tiers}
