"""/v1/documents: everything about what became of an upload. Takes file ids and document ids alike."""

import time
from dataclasses import replace
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from service.citations import folder_of, places
from service.dependencies import JsonDep, Services, ServicesDep, TenantDep, get_services, get_tenant
from service.documents.base import DocumentRecord, FileRecord
from service.errors import NotFound, NotReady
from service.exchange import respond
from service.ingest.locate import MAX_QUOTE_CHARS
from service.intake import find_file, take_upload
from service.kv_policy import apply_kv_policy, delete_handle
from service.progress import document_events, parse_event_id
from service.schemas import DocumentPatch, SummaryRequest
from service.sse import EventStream
from service.summary import summary_chat
from service.uploads import clean_name
from service.views import document_view, document_views, head_map, page, prefill_id, recall_view
from service.waiting import failed

router = APIRouter(prefix="/v1/documents")


def get_handle(services: Services, tenant: str, any_id: str) -> FileRecord:
    """The file handle of a file id; of a document id, the oldest handle that this tenant has. Raises NotFound."""
    if any_id.startswith("doc-"):
        for handle in services.documents.handles(any_id):
            if found := find_file(services, tenant, handle.id):
                return found
    elif found := find_file(services, tenant, any_id):
        return found
    raise NotFound(f"No such document: {any_id}", param="id", code="document_not_found")


def get_document(services: Services, file: FileRecord) -> DocumentRecord:
    """Raises NotReady before ingest is done, DocumentFailed if it failed."""
    if file.document_id is not None:
        return services.documents.document(file.document_id)
    if file.status == "error":
        raise failed(file)
    raise NotReady(f"{file.id} is still being ingested: wait until its state is 'prefill' or 'ready'")


@router.post("")
async def create_document(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    file = await take_upload(services, request, tenant, single=False)
    return await to_thread.run_sync(document_view, services, file)


@router.get("")
def list_documents(
    services: ServicesDep,
    tenant: TenantDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    records = services.documents.files(tenant, limit=limit + 1, after=after, order=order, purpose=None)
    return page(records, lambda files: document_views(services, files), limit=limit)


@router.get("/{any_id}")
async def retrieve_document(
    any_id: str, request: Request, include: Annotated[Literal["head_map"] | None, Query()] = None
) -> Response:
    """Asked most of all: by few threads, since more would only take turns, and without a second look at the answer.

    `include=head_map` adds each head's pattern, which lists and polls are spared.
    """
    services, tenant = get_services(request), get_tenant(request)

    def view() -> dict[str, Any]:
        file = get_handle(services, tenant, any_id)
        seen = document_view(services, file)
        return seen if include is None else seen | {"head_map": head_map(services, file)}

    return JSONResponse(await to_thread.run_sync(view, limiter=services.status_threads))


@router.patch("/{any_id}")
def update_document(any_id: str, body: JsonDep, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    """Pin, KV lifetime, expiry and name of a handle; null takes a lifetime or an expiry away."""
    file = get_handle(services, tenant, any_id)
    patch = DocumentPatch.model_validate(body)
    given = patch.model_fields_set
    changes: dict[str, Any] = {}
    if patch.pin is not None:
        changes["pinned"] = patch.pin
    if "kv_ttl_s" in given:
        changes["kv_ttl_s"] = patch.kv_ttl_s
    if "expires_after_s" in given:
        changes["expires_at"] = None if patch.expires_after_s is None else time.time() + patch.expires_after_s
    if patch.filename is not None:
        changes["filename"] = clean_name(patch.filename)
    if changes:
        services.documents.update_file(file.id, changes)
        file = replace(file, **changes)
    if file.document_id is not None and {"pinned", "kv_ttl_s"} & changes.keys():
        apply_kv_policy(services.documents, services.kv_store, file.document_id, file.fidelity)
    return document_view(services, file)


@router.delete("/{any_id}")
def delete_document(any_id: str, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    """A file id: that handle. A document id: every handle that this tenant has on it. Running work is cancelled."""
    first = get_handle(services, tenant, any_id)
    doomed = [first.id]
    if any_id.startswith("doc-"):
        doomed = [handle.id for handle in services.documents.handles(any_id) if handle.tenant == tenant]
    for file_id in doomed:
        delete_handle(services.documents, services.kv_store, tenant, file_id)
        services.uploads.remove(file_id)
    return {"id": any_id, "object": "document", "deleted": True}


@router.get("/{any_id}/manifest")
def retrieve_manifest(any_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    document = get_document(services, get_handle(services, tenant, any_id))
    return FileResponse(folder_of(services, document) / "manifest.json", media_type="application/json")


@router.get("/{any_id}/recall")
def retrieve_recall(any_id: str, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    """Density and recall of each segment; none for what came from KV stored before, or was not prefilled yet."""
    file = get_handle(services, tenant, any_id)
    return recall_view(services, file, get_document(services, file))


@router.get("/{any_id}/events")
async def stream_events(
    any_id: str,
    services: ServicesDep,
    tenant: TenantDep,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Server-sent events of ingest and prefill; a reconnecting client goes on where it was."""
    parse_event_id(last_event_id)
    file = await to_thread.run_sync(get_handle, services, tenant, any_id)
    return EventStream(document_events(services, tenant, file.id, last_event_id))


@router.post("/{any_id}/summary")
async def summarize(any_id: str, request: Request, body: JsonDep, services: ServicesDep, tenant: TenantDep) -> Response:
    file = await to_thread.run_sync(get_handle, services, tenant, any_id)
    wanted = SummaryRequest.model_validate(body)
    chat = summary_chat(wanted, model=services.model.id, file_id=file.id)

    def shape(completion: dict[str, Any]) -> dict[str, Any]:
        choice = completion["choices"][0]
        return {
            "id": file.id,
            "object": "document.summary",
            "model": completion["model"],
            "summary": choice["message"]["content"],
            "finish_reason": choice["finish_reason"],
            "quotes": completion["foreword"].pop("quotes"),
            "quotes_dropped": completion["foreword"].pop("quotes_dropped"),
            "annotations": choice["message"]["annotations"],
            "usage": completion["usage"],
            "foreword": completion["foreword"],
        }

    return await respond(request, services, tenant, chat, shape=shape, check_quotes=True)


@router.get("/{any_id}/locate")
def locate(
    any_id: str,
    services: ServicesDep,
    tenant: TenantDep,
    text: Annotated[str, Query(min_length=1, max_length=MAX_QUOTE_CHARS)],
) -> dict[str, Any]:
    """Every place where a quoted passage stands: file, page, line, tokens."""
    file = get_handle(services, tenant, any_id)
    document = get_document(services, file)
    return {"object": "list", "data": places(services, document, text)}


@router.post("/{any_id}/verify")
def verify(any_id: str, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    """Read and check every stored block of the document's KV; damaged ones are removed, and made again when needed."""
    file = get_handle(services, tenant, any_id)
    get_document(services, file)
    report = services.kv_store.verify(prefill_id(file))
    return {
        "id": file.id,
        "object": "document.verification",
        "ok": report.ok,
        "segments": report.num_segments,
        "blocks": report.num_blocks,
        "bytes": report.size_bytes,
        "bad": [{"segment": bad.copy.key, "group": bad.group, "reason": bad.reason} for bad in report.bad],
    }
