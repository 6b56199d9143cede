"""The backend of one machine: everything in the data folder."""

from contextlib import ExitStack

from engine.interfaces import Engine
from service.backend import ApiBackend, WorkerBackend
from service.database import Database, database_path
from service.documents.sqlite import SqliteDocuments
from service.limits.sqlite import SqliteLimits
from service.local_kv import LocalKV
from service.objects.sqlite import SqliteObjects
from service.presence import Presence, Workers
from service.queue.sqlite_queue import SqliteQueue
from service.salt import load_secret
from service.settings import Settings


def open_api(settings: Settings, stack: ExitStack) -> ApiBackend:
    """Raises DatabaseError."""
    database, queue = _open(settings, stack)
    return ApiBackend(
        queue=queue,
        documents=SqliteDocuments(database),
        objects=SqliteObjects(database),
        limits=SqliteLimits(database),
        workers=Workers(settings.data_dir),
        secret=load_secret(settings.data_dir),
        view_kv=LocalKV,
        tick=lambda: None,
    )


def open_worker(settings: Settings, engine: Engine, stack: ExitStack) -> WorkerBackend:
    """Raises DatabaseError."""
    database, queue = _open(settings, stack)
    presence = Presence(settings.data_dir, engine)
    stack.callback(presence.close)
    return WorkerBackend(queue, SqliteDocuments(database), presence, load_secret(settings.data_dir))


def _open(settings: Settings, stack: ExitStack) -> tuple[Database, SqliteQueue]:
    database = Database(database_path(settings.data_dir))
    stack.callback(database.close)
    queue = SqliteQueue(database)
    stack.callback(queue.close)
    return database, queue
