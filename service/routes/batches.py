"""/v1/batches: many questions in one file, in the OpenAI shape."""

from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Query
from starlette.requests import Request

from service.batches import Batches, NewBatch, batch_view
from service.dependencies import JsonDep, ServicesDep, TenantDep
from service.payloads import origin_of

router = APIRouter(prefix="/v1/batches")


@router.post("")
async def create_batch(request: Request, body: JsonDep, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    wanted, batches = NewBatch.model_validate(body), Batches(services, tenant)
    key, origin = request.headers.get("idempotency-key"), dict(origin_of(request.scope["state"]))
    stored = await to_thread.run_sync(batches.create, wanted, key, origin)
    services.background.nudge()
    return batch_view(stored)


@router.get("")
def list_batches(
    services: ServicesDep,
    tenant: TenantDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> dict[str, Any]:
    found = Batches(services, tenant).find(limit=limit + 1, after=after)
    data = [batch_view(stored) for stored in found[:limit]]
    return {
        "object": "list",
        "data": data,
        "has_more": len(found) > limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


@router.get("/{batch_id}")
def retrieve_batch(batch_id: str, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    return batch_view(Batches(services, tenant).get(batch_id))


@router.post("/{batch_id}/cancel")
async def cancel_batch(batch_id: str, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    stored = await to_thread.run_sync(Batches(services, tenant).cancel, batch_id)
    services.background.nudge()
    return batch_view(stored)
