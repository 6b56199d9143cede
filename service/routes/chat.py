"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.dependencies import JsonDep, ServicesDep, TenantDep
from service.errors import NotFound
from service.exchange import respond
from service.schemas import parse_chat

router = APIRouter(prefix="/v1/chat")


@router.post("/completions")
async def create_chat_completion(request: Request, body: JsonDep, services: ServicesDep, tenant: TenantDep) -> Response:
    chat = parse_chat(body)
    if chat.model not in services.model.aliases:
        raise NotFound(
            f"The model '{chat.model}' does not exist; this server has '{services.model.id}'.",
            param="model",
            code="model_not_found",
        )
    return await respond(request, services, tenant, chat)
