"""/v1/models: the one model that is served."""

from typing import Any

from fastapi import APIRouter

from service.dependencies import ServicesDep
from service.errors import NotFound

router = APIRouter(prefix="/v1/models")


@router.get("")
def list_models(services: ServicesDep) -> dict[str, Any]:
    return {"object": "list", "data": [services.model.view()]}


@router.get("/{model_id:path}")
def retrieve_model(model_id: str, services: ServicesDep) -> dict[str, Any]:
    if model_id not in services.model.aliases:
        raise NotFound(f"The model '{model_id}' does not exist", param="model", code="model_not_found")
    return services.model.view()
