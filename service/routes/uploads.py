"""/v1/uploads: one large file in parts, in the OpenAI shape."""

from typing import Any

from anyio import to_thread
from fastapi import APIRouter
from starlette.requests import Request

from service.dependencies import JsonDep, PrincipalDep, ServicesDep, TenantDep
from service.parts import PartUploads

router = APIRouter(prefix="/v1/uploads")


@router.post("")
async def create_upload(
    request: Request, body: JsonDep, services: ServicesDep, principal: PrincipalDep
) -> dict[str, Any]:
    uploads, key = PartUploads(services), request.headers.get("idempotency-key")
    return uploads.view(await to_thread.run_sync(uploads.create, principal, body, key))


@router.post("/{upload_id}/parts")
async def create_part(
    upload_id: str, request: Request, services: ServicesDep, principal: PrincipalDep
) -> dict[str, Any]:
    return await PartUploads(services).add_part(request, principal, upload_id)


@router.post("/{upload_id}/complete")
async def complete_upload(
    upload_id: str, request: Request, body: JsonDep, services: ServicesDep, principal: PrincipalDep
) -> dict[str, Any]:
    return await PartUploads(services).complete(request, principal, upload_id, body)


@router.post("/{upload_id}/cancel")
def cancel_upload(upload_id: str, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    uploads = PartUploads(services)
    return uploads.view(uploads.cancel(tenant, upload_id))
