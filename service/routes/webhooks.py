"""/v1/webhook_endpoints: who is told what, in the OpenAI shape."""

from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from service.dependencies import JsonDep, ServicesDep, TenantDep
from service.errors import InvalidRequest
from service.webhook_sender import Undelivered
from service.webhooks import (
    EVENT_TYPES,
    EndpointPatch,
    Endpoints,
    EventType,
    NewEndpoint,
    endpoint_view,
    event_body,
)

router = APIRouter(prefix="/v1")


class RotateSecret(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keep_old_secret_active_for_24_hours: bool = False


class SampleEvent(BaseModel):
    model_config = ConfigDict(extra="forbid")

    event_type: EventType


def get_endpoints(services: ServicesDep, tenant: TenantDep) -> Endpoints:
    return Endpoints(services.objects, tenant, allow_private=services.settings.webhook_allow_private)


EndpointsDep = Annotated[Endpoints, Depends(get_endpoints)]


@router.get("/webhook_event_types")
def list_event_types() -> dict[str, Any]:
    return {"object": "list", "data": list(EVENT_TYPES)}


@router.post("/webhook_endpoints")
async def create_endpoint(request: Request, body: JsonDep, endpoints: EndpointsDep) -> dict[str, Any]:
    wanted, key = NewEndpoint.model_validate(body), request.headers.get("idempotency-key")
    return endpoint_view(await to_thread.run_sync(endpoints.create, wanted, key), with_secret=True)


@router.get("/webhook_endpoints")
def list_endpoints(
    endpoints: EndpointsDep, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> dict[str, Any]:
    found = list(endpoints.all())
    start = next((place + 1 for place, stored in enumerate(found) if stored.id == after), 0)
    data = [endpoint_view(stored) for stored in found[start : start + limit]]
    return {
        "object": "list",
        "data": data,
        "has_more": len(found) > start + limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


@router.get("/webhook_endpoints/{endpoint_id}")
def retrieve_endpoint(endpoint_id: str, endpoints: EndpointsDep) -> dict[str, Any]:
    return endpoint_view(endpoints.get(endpoint_id))


@router.post("/webhook_endpoints/{endpoint_id}")
async def update_endpoint(endpoint_id: str, body: JsonDep, endpoints: EndpointsDep) -> dict[str, Any]:
    return endpoint_view(await to_thread.run_sync(endpoints.update, endpoint_id, EndpointPatch.model_validate(body)))


@router.delete("/webhook_endpoints/{endpoint_id}")
def delete_endpoint(endpoint_id: str, endpoints: EndpointsDep) -> dict[str, Any]:
    endpoints.delete(endpoint_id)
    return {"id": endpoint_id, "object": "webhook_endpoint.deleted", "deleted": True}


@router.post("/webhook_endpoints/{endpoint_id}/rotate_secret")
async def rotate_secret(endpoint_id: str, body: JsonDep, endpoints: EndpointsDep) -> dict[str, Any]:
    keep_old = RotateSecret.model_validate(body).keep_old_secret_active_for_24_hours
    stored = await to_thread.run_sync(lambda: endpoints.rotate(endpoint_id, keep_old=keep_old))
    return endpoint_view(stored, with_secret=True)


@router.post("/webhook_endpoints/{endpoint_id}/test")
async def send_sample(
    endpoint_id: str, body: JsonDep, endpoints: EndpointsDep, services: ServicesDep
) -> dict[str, Any]:
    """Send a sample now, once."""
    sample = SampleEvent.model_validate(body)
    endpoint = await to_thread.run_sync(endpoints.get, endpoint_id)
    event_id = "evt_sample"
    try:
        status = await services.sender.send(endpoint, event_id, event_body(event_id, sample.event_type, "sample"))
    except Undelivered as error:
        raise InvalidRequest(f"the endpoint did not answer: {error}", code="webhook_unreachable") from error
    return {
        "object": "webhook_endpoint.test",
        "webhook_endpoint_id": endpoint_id,
        "event_type": sample.event_type,
        "status_code": status,
        "success": True,
    }
