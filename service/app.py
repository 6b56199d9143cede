"""The HTTP application, built from what it is handed. Never loads torch."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

from anyio import to_thread
from fastapi import FastAPI

from service import errors
from service.auth import KeyRing
from service.dependencies import KVDescriptions, Services
from service.documents.base import Documents
from service.idempotency import Idempotency
from service.limits.base import LimitStore
from service.limits.gate import Gate
from service.metrics import Metrics
from service.middleware import Authentication, RequestScope
from service.objects.base import Objects
from service.origins import OwnPagesOnly
from service.queue.base import Queue, QueueUnavailable
from service.routes import chat, console, files, health, models, passages
from service.routes import documents as document_routes
from service.served_model import ServedModel
from service.settings import Settings
from service.traces import Traces
from service.uploads import UploadStore

log = logging.getLogger(__name__)

# Blocking calls (SQLite, files) run in threads; streams wait without one.
THREADS = 64


def create_app(
    settings: Settings,
    *,
    queue: Queue,
    documents: Documents,
    objects: Objects,
    limits: LimitStore,
    kv_store: KVDescriptions,
    model: ServedModel,
    metrics: Metrics,
    worker_seen: Callable[[], bool],
    engine_digest: Callable[[str], str | None],
    keys: KeyRing | None = None,
    traces: Traces | None = None,
) -> FastAPI:
    """The app for one API process; what it is handed stays the caller's to close.

    `worker_seen` says whether a worker was heard of lately, `engine_digest` what KV of a fidelity is made under now.
    """
    uploads = UploadStore(
        settings.files_dir,
        documents,
        max_upload_bytes=settings.max_upload_bytes,
        cap_bytes=settings.upload_bytes,
        disk_floor_bytes=settings.disk_floor_bytes,
    )
    services = Services(
        settings=settings,
        queue=queue,
        documents=documents,
        objects=objects,
        gate=Gate(limits),
        kv_store=kv_store,
        model=model,
        uploads=uploads,
        metrics=metrics,
        worker_seen=worker_seen,
        engine_digest=engine_digest,
        traces=traces or Traces(),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = THREADS
        try:
            await to_thread.run_sync(uploads.sweep)
        except QueueUnavailable as error:  # Redis is away: half uploads lie until the next start
            log.warning("uploads not swept: %s", error)
        log.info("serving %s, %d positions", model.id, model.max_positions)
        yield

    app = FastAPI(title="Foreword", version=version("foreword"), lifespan=lifespan)
    app.state.services = services
    errors.install(app)
    app.state.keys = bool(keys)
    for routes in (files, document_routes, passages, chat, models, health, console):
        app.include_router(routes.router)
    app.add_middleware(Idempotency, objects=objects)
    app.add_middleware(Authentication, keys=keys or KeyRing(), gate=services.gate)
    if not keys:
        app.add_middleware(OwnPagesOnly, settings=settings)
    app.add_middleware(RequestScope, metrics=metrics, traces=services.traces)
    return app
