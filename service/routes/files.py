"""/v1/files: handles of uploads, in the OpenAI shape."""

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from service.dependencies import ServicesDep, TenantDep
from service.errors import NotFound
from service.intake import find_file, get_file, take_upload
from service.kv_policy import delete_handle
from service.uploads import zip_stream
from service.views import file_view, file_views, page

router = APIRouter(prefix="/v1/files")

Limit = Annotated[int, Query(ge=1, le=10_000)]
Order = Literal["asc", "desc"]


@router.post("")
async def create_file(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    return file_view(await take_upload(services, request, tenant, single=True))


@router.get("")
def list_files(
    services: ServicesDep,
    tenant: TenantDep,
    limit: Limit = 10_000,
    order: Order = "desc",
    after: str | None = None,
    purpose: str | None = None,
) -> dict[str, Any]:
    records = services.documents.files(tenant, limit=limit + 1, after=after, order=order, purpose=purpose)
    return page(records, file_views, limit=limit)


@router.get("/{file_id}")
def retrieve_file(file_id: str, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    return file_view(get_file(services, tenant, file_id))


@router.delete("/{file_id}")
def delete_file(file_id: str, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    if find_file(services, tenant, file_id) is None:
        raise NotFound(f"No such File object: {file_id}", param="id", code="file_not_found")
    delete_handle(services.documents, services.kv_store, tenant, file_id)
    services.uploads.remove(file_id)
    return {"id": file_id, "object": "file", "deleted": True}


@router.get("/{file_id}/content")
def file_content(file_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    """The bytes as they were uploaded; several files come as one zip archive."""
    return content(services.uploads.paths(get_file(services, tenant, file_id).sources), file_id)


def content(files: list[tuple[str, Path]], file_id: str) -> Response:
    headers = {"x-content-type-options": "nosniff"}
    if not all(path.is_file() for _, path in files):
        raise NotFound(f"the bytes of {file_id} are gone", param="id", code="file_not_found")
    if len(files) == 1:
        name, path = files[0]
        return FileResponse(path, media_type="application/octet-stream", filename=name, headers=headers)
    headers["content-disposition"] = f"attachment; filename={quote(file_id)}.zip"
    return StreamingResponse(zip_stream(files), media_type="application/zip", headers=headers)
