"""`foreword serve`: the API in this process; on one machine, with nothing else installed, a worker beside it.

With Redis any number of these run, here and elsewhere, and workers are processes of their own (`foreword worker`).
"""

import logging
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from service.auth import KeyRing, check_binding
from service.locks import AlreadyLocked, PidLock
from service.logs import configure_logging, log_uncaught
from service.metrics_folder import begin_metrics, join_metrics
from service.queue.base import QueueUnavailable
from service.settings import Settings
from service.supervisor import Supervisor, environment, worker_command
from service.timer import Timer

log = logging.getLogger(__name__)

SHUTDOWN_S = 5  # open streams are cut after this
RECLAIM_S = 1.0
READER_S = 10.0  # answers that only this process reads end when it was silent for so long


class AddressInUse(Exception):
    """Another program listens there, or the address isn't this machine's."""

    code = "address_in_use"


class WorkerUnusable(Exception):
    """No worker can run with this model and these settings."""

    code = "worker_unusable"


def serve(settings: Settings, command: Sequence[str] | None = None) -> None:
    """Until SIGTERM or SIGINT. `command` starts a worker (default: this package's).

    Raises AlreadyLocked, AddressInUse, AuthError, ModelError, WorkerUnusable, and what opening the backend raises.
    """
    settings = settings.resolved()
    configure_logging(settings.log_level)
    log_uncaught()
    keys = KeyRing.load(settings.api_keys_file)
    check_binding(settings.host, keys, insecure=settings.insecure)
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # other users' documents lie there
    with ExitStack() as stack:
        alone = _lock(settings, stack)
        listener = stack.enter_context(listen(settings.host, settings.port))
        (begin_metrics if alone else join_metrics)(settings.data_dir)
        _serve(settings, keys, listener, command or worker_command(), stack)


def _lock(settings: Settings, stack: ExitStack) -> bool:
    """Whether this is the only server on the data folder. Raises AlreadyLocked where it must be and isn't."""
    try:
        stack.enter_context(PidLock(settings.data_dir / "foreword.lock"))
    except AlreadyLocked:
        if settings.redis_url is None:
            raise
        return False
    return True


def _serve(
    settings: Settings, keys: KeyRing, listener: socket.socket, command: Sequence[str], stack: ExitStack
) -> None:
    # Only now: a refused start needs none of it.
    import uvicorn

    from engine.kv_store import Counters, DiskLimits, KVCatalog
    from engine.model_folder import resolve_model
    from service.app import create_app
    from service.backend import open_api_backend
    from service.housekeeping import reclaim
    from service.metrics import Metrics
    from service.served_model import ServedModel
    from service.traces import open_traces

    folder = resolve_model(settings.model, cache_dir=settings.cache_dir, weights=False)
    model = ServedModel.load(settings.model, folder)
    backend = open_api_backend(settings, model, stack)
    metrics = Metrics(keys.tenants)
    counters = Counters()
    metrics.watch_kv(counters.snapshot)
    catalog = KVCatalog(
        settings.data_dir / "kv",
        DiskLimits(settings.kv_disk_bytes, settings.disk_floor_bytes),
        counters=counters,
    )
    stack.callback(catalog.close)
    traces = open_traces(settings.otlp_endpoint, process="api", model=model.id)
    stack.callback(traces.close)
    app = create_app(
        settings,
        queue=backend.queue,
        documents=backend.documents,
        objects=backend.objects,
        limits=backend.limits,
        kv_store=backend.view_kv(catalog),
        model=model,
        metrics=metrics,
        worker_seen=backend.workers.seen,
        engine_digest=backend.workers.digest,
        worker_names=backend.workers.names,
        keys=keys,
        traces=traces,
    )

    def tick() -> None:  # also while no worker lives to do it
        backend.tick()
        try:
            backend.queue.attend(app.state.services.reader, for_s=READER_S)
            reclaim(backend.queue, metrics)
        except QueueUnavailable as error:
            log.warning("no leases looked at: %s", error)

    tick()
    stack.callback(Timer("reclaim", RECLAIM_S, tick).close)
    # asyncio's own loop: with uvloop a status request costs as much CPU time (1.3 ms under either), being our own work.
    config = uvicorn.Config(
        app,
        loop="asyncio",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
        lifespan="on",
        server_header=False,
    )
    server = uvicorn.Server(config)
    unusable = threading.Event()

    def worker_died(pid: int) -> None:
        metrics.worker_restarts.inc()

    def worker_unusable() -> None:
        unusable.set()
        server.should_exit = True

    if settings.redis_url is None:
        supervisor = Supervisor(command, environment(settings), died=worker_died, unusable=worker_unusable)
        supervisor.start()
        stack.callback(supervisor.close)

    def stop(number: int, frame: object) -> None:
        server.should_exit = True

    # For a signal before uvicorn has its own handlers; it also hands on here what it got, when it is done.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d, data in %s", host, port, settings.files_dir)
    server.run(sockets=[listener])
    if unusable.is_set():
        raise WorkerUnusable("the worker can't run with this model and these settings: its last log line says why")
    log.info("server ends")


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises AddressInUse."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, since asyncio looks at it: without TCP_NODELAY each response waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise AddressInUse(f"can't listen on {host} port {port}: {error.strerror or error}") from error
    return listener
