"""Is it alive, can it take work, has it started; and its metrics."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response
from starlette.status import HTTP_200_OK

from service.dependencies import ServicesDep
from service.errors import Unavailable
from service.metrics import CONTENT_TYPE
from service.metrics_state import StateCollector
from service.metrics_vllm import vllm_names
from service.queue.base import QueueError

router = APIRouter()


@router.get("/livez")
async def live() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/startupz")
async def started(services: ServicesDep) -> dict[str, str]:
    """Answers only once the lifespan has opened everything."""
    return {"status": "ok", "model": services.model.id}


@router.get("/readyz")
def ready(services: ServicesDep) -> Response:
    """Whether a question put now would be answered: queue reachable, a worker seen lately."""
    checks: dict[str, Any] = {}
    try:
        checks["queue"] = {"ok": True, "jobs": dict(services.queue.counts())}
    except (QueueError, OSError) as error:
        checks["queue"] = {"ok": False, "reason": str(error)}
    checks["worker"] = {"ok": services.worker_seen()}
    ok = all(check["ok"] for check in checks.values())
    body = {"status": "ok" if ok else "unavailable", "checks": checks}
    return JSONResponse(body, status_code=HTTP_200_OK if ok else Unavailable.status)


@router.get("/metrics")
def metrics(services: ServicesDep) -> Response:
    state = StateCollector(
        services.settings,
        services.queue,
        services.kv_store.usage,
        services.documents.uploaded_bytes,
        tenant=services.metrics.tenant,
    )
    if services.settings.metrics_vllm_names:
        text = services.metrics.render(state, rename=vllm_names(services.model.id))
    else:
        text = services.metrics.render(state)
    return Response(text, media_type=CONTENT_TYPE)
