"""Where jobs and records are kept: in one machine's SQLite, or in Redis for any number of machines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from engine.interfaces import Engine
from engine.kv_store import KVCatalog
from service.dependencies import KVDescriptions
from service.documents.base import CollectedDocuments
from service.limits.base import LimitStore
from service.objects.base import Objects
from service.queue.base import Queue
from service.served_model import ServedModel
from service.settings import Settings


class SharedDirMissing(Exception):
    """FOREWORD_REDIS_URL alone is not enough: uploads and documents must lie where all machines see them."""

    code = "shared_dir_missing"


class RedisMissing(Exception):
    """redis-py is not installed."""

    code = "redis_missing"

    def __init__(self) -> None:
        super().__init__("FOREWORD_REDIS_URL is set, and redis-py is not installed: pip install 'foreword[redis]'")


class FleetDiffers(Exception):
    """This process serves another model, or computes in another way, than the workers that live: KV and token ids of
    the one mean nothing to the other."""

    code = "fleet_differs"


class WorkersSeen(Protocol):
    """What API processes know of workers."""

    def seen(self) -> bool:
        """Whether a worker with a loaded model was heard of lately."""
        ...

    def digest(self, fidelity: str) -> str | None:
        """What KV of this fidelity is made under now; None while no worker is seen."""
        ...

    def names(self) -> Sequence[str]:
        """Of the workers that live, as jobs name them."""
        ...


class SignOfLife(Protocol):
    """What a worker tells of itself, each second."""

    def beat(self) -> None:
        """Raises FleetDiffers, QueueUnavailable where there are other machines."""
        ...

    def close(self) -> None: ...


class KVReport(Protocol):
    """What a worker's KV folder holds, for those who have no eye on it."""

    def describe(self, holder: str) -> Mapping[str, int]:
        """Bytes by tier."""
        ...

    def holders(self) -> Mapping[str, int]:
        """Bytes on disk of every holder that has any."""
        ...

    def usage(self) -> Mapping[str, int]:
        """Bytes of all of it, by tier."""
        ...


@dataclass(frozen=True)
class ApiBackend:
    """What one API process works with."""

    queue: Queue
    documents: CollectedDocuments
    objects: Objects
    limits: LimitStore
    workers: WorkersSeen
    secret: bytes
    view_kv: Callable[[KVCatalog], KVDescriptions]  # of this machine's KV folder → of everybody's
    tick: Callable[[], None]  # due each second


@dataclass(frozen=True)
class WorkerBackend:
    """What one worker works with."""

    queue: Queue
    documents: CollectedDocuments
    life: SignOfLife
    secret: bytes


def open_api_backend(settings: Settings, model: ServedModel, stack: ExitStack) -> ApiBackend:
    """Closed with `stack`. Raises what the kind of backend raises, RedisMissing and SharedDirMissing."""
    if settings.redis_url is None:
        from service.embedded import open_api

        return open_api(settings, stack)
    with _redis_needed():
        from service.cluster import open_api as open_cluster_api
    return open_cluster_api(settings, model, stack)


def open_worker_backend(
    settings: Settings, name: str, engine: Engine, model: ServedModel, kv: KVReport, stack: ExitStack
) -> WorkerBackend:
    """Closed with `stack`. Raises what the kind of backend raises, RedisMissing and SharedDirMissing."""
    if settings.redis_url is None:
        from service.embedded import open_worker

        return open_worker(settings, engine, stack)
    with _redis_needed():
        from service.cluster import open_worker as open_cluster_worker
    return open_cluster_worker(settings, name, engine, model, kv, stack)


@contextmanager
def _redis_needed() -> Iterator[None]:
    """Raises RedisMissing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == "redis":
            raise RedisMissing from error
        raise
