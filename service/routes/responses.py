"""/v1/responses: answers that are kept for a day, made in the background if asked, in the OpenAI shape."""

from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.dependencies import JsonDep, PrincipalDep, ServicesDep, TenantDep
from service.errors import NotFound
from service.response_records import read_request
from service.response_schemas import parse_response
from service.response_views import response_view
from service.responses import Responses
from service.sse import EventStream, until_disconnect

router = APIRouter(prefix="/v1/responses")


@router.post("")
async def create_response(request: Request, body: JsonDep, services: ServicesDep, principal: PrincipalDep) -> Response:
    wanted = parse_response(body)
    if wanted.model not in services.model.aliases:
        raise NotFound(
            f"The model '{wanted.model}' does not exist; this server has '{services.model.id}'.",
            param="model",
            code="model_not_found",
        )
    live = await Responses(services).create(request, principal, wanted)
    if wanted.stream:
        return EventStream(live.events())
    if wanted.background:
        return JSONResponse(await to_thread.run_sync(response_view, services, live.stored))
    return JSONResponse(await until_disconnect(request, live.whole))


@router.get("/{response_id}")
async def retrieve_response(
    response_id: str,
    services: ServicesDep,
    tenant: TenantDep,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """As it stands; with `stream` its events, behind number `starting_after`."""
    responses = Responses(services)
    stored = await to_thread.run_sync(responses.find, tenant, response_id)
    view = await to_thread.run_sync(response_view, services, stored)
    return EventStream(responses.follow(stored, starting_after)) if stream else JSONResponse(view)


@router.delete("/{response_id}")
def delete_response(response_id: str, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    Responses(services).delete(tenant, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/{response_id}/cancel")
def cancel_response(response_id: str, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    return response_view(services, Responses(services).cancel(tenant, response_id))


@router.get("/{response_id}/input_items")
def list_input_items(
    response_id: str,
    services: ServicesDep,
    tenant: TenantDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """What was asked in this turn."""
    stored = Responses(services).find(tenant, response_id)
    items = []
    for number, message in enumerate(read_request(stored).input):
        content = message.model_dump(exclude_none=True)["content"]
        if isinstance(content, str):
            content = [{"type": "output_text" if message.role == "assistant" else "input_text", "text": content}]
        item_id = f"msg_{number}_{stored.id.removeprefix('resp_')}"
        items.append({"id": item_id, "type": "message", "role": message.role, "content": content})
    items = items if order == "asc" else items[::-1]
    start = next((place + 1 for place, item in enumerate(items) if item["id"] == after), 0)
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "has_more": len(items) > start + limit,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }
