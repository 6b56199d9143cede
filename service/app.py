"""The HTTP application, built from what it is handed. Never loads torch."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version

from anyio import to_thread
from fastapi import FastAPI

from service import errors
from service.addresses import PublicNetwork
from service.auth import KeyRing
from service.background import Background, Held, Keeper
from service.batch_keeper import BatchKeeper
from service.deliveries import DeliveryKeeper, FileWatch
from service.dependencies import KVDescriptions, Services
from service.documents.base import Documents
from service.idempotency import Idempotency
from service.limits.base import LimitStore
from service.limits.gate import Gate
from service.metrics import Metrics
from service.middleware import Authentication, RequestScope
from service.objects.base import ObjectKind, Objects
from service.origins import OwnPagesOnly
from service.parts import PartUploads
from service.queue.base import Queue, QueueUnavailable
from service.response_keeper import ResponseKeeper
from service.routes import admin, batches, chat, console, files, health, models, passages, responses, uploads, webhooks
from service.routes import documents as document_routes
from service.served_model import ServedModel
from service.settings import Settings
from service.traces import Traces
from service.uploads import UploadStore
from service.webhook_sender import Sender

log = logging.getLogger(__name__)

ROUTES = (
    files,
    uploads,
    document_routes,
    passages,
    chat,
    responses,
    batches,
    webhooks,
    models,
    admin,
    health,
    console,
)

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
    worker_names: Callable[[], Sequence[str]],
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
    gate = Gate(limits)
    services = Services(
        settings=settings,
        queue=queue,
        documents=documents,
        objects=objects,
        gate=gate,
        kv_store=kv_store,
        model=model,
        uploads=uploads,
        metrics=metrics,
        worker_seen=worker_seen,
        engine_digest=engine_digest,
        worker_names=worker_names,
        background=Background(objects, gate),
        sender=Sender(PublicNetwork(allow_private=settings.webhook_allow_private)),
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
        async with services.sender, services.background.running(_keepers(services)):
            yield

    # Without the framework's pages of documentation: they load scripts from elsewhere, into the console's own origin.
    app = FastAPI(title="Foreword", version=version("foreword"), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.services = services
    errors.install(app)
    app.state.keys = bool(keys)
    for routes in ROUTES:
        app.include_router(routes.router)
    app.add_middleware(Idempotency, objects=objects)
    app.add_middleware(Authentication, keys=keys or KeyRing(), gate=services.gate)
    if not keys:
        app.add_middleware(OwnPagesOnly, settings=settings)
    app.add_middleware(RequestScope, metrics=metrics, traces=services.traces)
    return app


def _keepers(services: Services) -> dict[ObjectKind, Keeper]:
    """Who looks after what the API keeps (service.background), and after how many of them at once."""
    return {
        "response": Keeper(ResponseKeeper(services), most=64),
        "delivery": Keeper(DeliveryKeeper(services, services.sender), most=32),
        "watch": Keeper(FileWatch(services), most=32),
        "batch": Keeper(BatchKeeper(services), most=16),
        "upload": Keeper(PartUploads(services).keeper, most=4),
        "idempotency": Keeper(Held.delete, most=16),
    }
