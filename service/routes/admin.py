"""/v1/admin: the work of all tenants, for keys with the admin right."""

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query

from service.dependencies import PrincipalDep, ServicesDep
from service.errors import Conflict, Forbidden, NotFound
from service.queue.base import Job, NotRequeued, UnknownJob

MAX_RUNNING = 1000


def require_admin(principal: PrincipalDep) -> None:
    if not principal.admin:
        raise Forbidden("this key has no admin right", code="admin_required")


router = APIRouter(prefix="/v1/admin", dependencies=[Depends(require_admin)])


@router.get("/queues")
def list_queues(services: ServicesDep) -> dict[str, Any]:
    """Unfinished jobs by kind and tenant, all jobs by state, and what the API itself has yet to do."""
    lanes = [
        {
            "kind": lane.kind,
            "tenant": lane.tenant,
            "queued": lane.queued,
            "running": lane.running,
            "oldest_queued_age_s": round(lane.oldest_queued_age_s, 3),
        }
        for lane in services.queue.lanes()
    ]
    due = {kind: services.objects.count_due(kind) for kind in ("batch", "delivery", "watch")}
    return {
        "object": "list",
        "data": lanes,
        "jobs": dict(services.queue.counts()),
        "oldest_queued_age_s": round(services.queue.oldest_queued_age_s(), 3),
        "due": due,
    }


@router.get("/workers")
def list_workers(services: ServicesDep) -> dict[str, Any]:
    """Who lives, and what each is doing."""
    running: dict[str, list[Job]] = {name: [] for name in services.worker_names()}
    for job in services.queue.jobs("running", limit=MAX_RUNNING):
        running.setdefault(job.worker or "unknown", []).append(job)
    data = [
        {"id": name, "object": "worker", "jobs": [_job_view(job) for job in jobs]} for name, jobs in running.items()
    ]
    return {"object": "list", "data": data, "seen": services.worker_seen()}


@router.get("/jobs")
def list_jobs(
    services: ServicesDep,
    state: Literal["queued", "running", "succeeded", "failed", "cancelled", "dead"] = "dead",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """Newest first; without `state` the dead letters."""
    return {"object": "list", "data": [_job_view(job) for job in services.queue.jobs(state, limit=limit)]}


@router.post("/jobs/{job_id}/requeue")
def requeue_job(job_id: str, services: ServicesDep) -> dict[str, Any]:
    """A dead or failed job begins anew, and its files wait for it again."""
    try:
        return _job_view(services.queue.requeue(job_id))
    except UnknownJob as error:
        raise _no_such(job_id) from error
    except NotRequeued as error:
        raise Conflict(str(error), code="not_requeued") from error


@router.post("/jobs/{job_id}/cancel")
def cancel_job(job_id: str, services: ServicesDep) -> dict[str, Any]:
    try:
        return _job_view(services.queue.cancel(job_id))
    except UnknownJob as error:
        raise _no_such(job_id) from error


def _no_such(job_id: str) -> NotFound:
    return NotFound(f"No such job: {job_id}", param="job_id", code="job_not_found")


def _job_view(job: Job) -> dict[str, Any]:
    """Without payload and result: what tenants asked, and were told, is theirs."""
    ended_at = job.finished_at if job.finished_at is not None else time.time()
    return {
        "id": job.id,
        "object": "job",
        "kind": job.kind,
        "tenant": job.tenant,
        "state": job.state,
        "priority": job.priority,
        "attempts": job.attempts,
        "progress": job.progress,
        "error": job.error,
        "worker": job.worker,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "age_s": round(max(0.0, ended_at - job.created_at), 3),
    }
