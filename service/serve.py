"""`foreword serve`: one machine, nothing else installed. The API in this process, a worker beside it."""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from service.auth import KeyRing, check_binding
from service.database import Database, database_path
from service.documents.sqlite import SqliteDocuments
from service.locks import PidLock
from service.logs import configure_logging
from service.metrics_folder import begin_metrics
from service.presence import Workers
from service.queue.sqlite_queue import SqliteQueue
from service.salt import load_secret
from service.settings import Settings
from service.supervisor import Supervisor, environment, worker_command
from service.timer import Timer

log = logging.getLogger(__name__)

SHUTDOWN_S = 5  # open streams are cut after this
RECLAIM_S = 1.0


class AddressInUse(Exception):
    """Another program listens there, or the address isn't this machine's."""

    code = "address_in_use"


class WorkerUnusable(Exception):
    """No worker can run with this model and these settings."""

    code = "worker_unusable"


def serve(settings: Settings, command: Sequence[str] | None = None) -> None:
    """Until SIGTERM or SIGINT. `command` starts a worker (default: this package's).

    Raises AlreadyLocked, AddressInUse, AuthError, ModelError, DatabaseError, WorkerUnusable.
    """
    settings = settings.resolved()
    configure_logging(settings.log_level)
    keys = KeyRing.load(settings.api_keys_file)
    check_binding(settings.host, keys, insecure=settings.insecure)
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # other users' documents lie there
    with ExitStack() as stack:
        stack.enter_context(PidLock(settings.data_dir / "foreword.lock"))
        listener = stack.enter_context(listen(settings.host, settings.port))
        begin_metrics(settings.data_dir)
        load_secret(settings.data_dir)
        _serve(settings, keys, listener, command or worker_command(), stack)


def _serve(
    settings: Settings, keys: KeyRing, listener: socket.socket, command: Sequence[str], stack: ExitStack
) -> None:
    # Only now, since prometheus-client looks for the shared folder when it is imported.
    import uvicorn

    from engine.kv_store import DiskLimits, KVCatalog
    from engine.model_folder import resolve_model
    from service.app import create_app
    from service.housekeeping import reclaim
    from service.metrics import Metrics, forget_process
    from service.served_model import ServedModel

    folder = resolve_model(settings.model, cache_dir=settings.cache_dir, weights=False)
    model = ServedModel.load(settings.model, folder)
    database = Database(database_path(settings.data_dir))
    stack.callback(database.close)
    queue = SqliteQueue(database)
    stack.callback(queue.close)
    catalog = KVCatalog(settings.data_dir / "kv", DiskLimits(settings.kv_disk_bytes, settings.disk_floor_bytes))
    stack.callback(catalog.close)
    metrics, workers = Metrics(), Workers(settings.data_dir)
    app = create_app(
        settings,
        queue=queue,
        documents=SqliteDocuments(database),
        kv_store=catalog,
        model=model,
        metrics=metrics,
        worker_seen=workers.seen,
        engine_digest=workers.digest,
        keys=keys,
    )

    def worker_died(pid: int) -> None:
        forget_process(pid)
        metrics.worker_restarts.inc()

    timer = Timer("reclaim", RECLAIM_S, lambda: reclaim(queue, metrics))  # also while no worker lives to do it
    stack.callback(timer.close)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=SHUTDOWN_S, lifespan="on", server_header=False
    )
    server = uvicorn.Server(config)
    unusable = threading.Event()

    def worker_unusable() -> None:
        unusable.set()
        server.should_exit = True

    supervisor = Supervisor(command, environment(settings), died=worker_died, unusable=worker_unusable)
    supervisor.start()
    stack.callback(supervisor.close)

    def stop(number: int, frame: object) -> None:
        server.should_exit = True

    # For a signal before uvicorn has its own handlers; it also hands on here what it got, when it is done.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d, data in %s", host, port, settings.data_dir)
    asyncio.run(server.serve(sockets=[listener]))
    if unusable.is_set():
        raise WorkerUnusable("the worker can't run with this model and these settings: its last log line says why")
    log.info("server ends")


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises AddressInUse."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise AddressInUse(f"can't listen on {host} port {port}: {error.strerror or error}") from error
    return listener
