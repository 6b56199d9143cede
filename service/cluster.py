"""The backend of several machines: Redis for jobs and records, one folder that all of them see for files."""

import logging
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

from blake3 import blake3

from engine.interfaces import Engine
from service.backend import ApiBackend, FleetDiffers, KVReport, SharedDirMissing, WorkerBackend
from service.documents.redis import RedisDocuments
from service.fleet import Fleet, FleetKV, FleetMember, Identity, site_of
from service.limits.redis import RedisLimits
from service.local_kv import LocalKV
from service.objects.redis import RedisObjects
from service.queue.base import QueueUnavailable
from service.queue.redis_queue import RedisQueue
from service.queue.redis_store import RedisRefused, RedisStore
from service.queue.redis_url import open_client
from service.salt import load_secret
from service.served_model import ServedModel
from service.settings import Settings

log = logging.getLogger(__name__)

LEAST_VERSION = 7
AGAIN_S = 2.0  # between two attempts to reach a Redis that is away
SAY_S = 10.0  # between two log lines about that
API_PATIENCE_S = 3.0  # a request is answered with 503 behind that
WORKER_PATIENCE_S = 20.0  # work is in hand: it is worth waiting for


class ClusterRefused(Exception):
    """This Redis can't be used with these settings."""

    code = "cluster_refused"


def open_api(settings: Settings, model: ServedModel, stack: ExitStack) -> ApiBackend:
    """Opens also while Redis is away: it is joined as soon as it is there.

    Raises SharedDirMissing, InvalidRedisUrl, RedisRefused, ClusterRefused, FleetDiffers.
    """
    store, secret = _open_store(settings, API_PATIENCE_S, stack)
    assert settings.redis_url is not None
    client = open_client(settings.redis_url, decode_responses=True)
    stack.callback(client.close)
    fleet = Fleet(store, model)
    joining = Joining(store, settings.files_dir, secret)
    queue = RedisQueue(store)
    stack.callback(queue.close)

    def tick() -> None:
        if joining.joined:
            return
        try:
            joining.join()
            fleet.check()
        except QueueUnavailable as error:
            joining.say(error)
        except (ClusterRefused, FleetDiffers) as error:
            # Known only now, since Redis was away at the start: as then, this process must not take anything.
            log.critical("%s", error)
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        joining.join()
        fleet.check()
    except RedisRefused:
        raise
    except QueueUnavailable as error:
        joining.say(error)
    return ApiBackend(
        queue=queue,
        documents=RedisDocuments(store),
        objects=RedisObjects(client),
        limits=RedisLimits(client),
        workers=fleet,
        secret=secret,
        view_kv=lambda catalog: FleetKV(store, fleet, LocalKV(catalog)),
        tick=tick,
    )


def open_worker(
    settings: Settings, name: str, engine: Engine, model: ServedModel, kv: KVReport, stack: ExitStack
) -> WorkerBackend:
    """Waits for a Redis that is away. Raises as `open_api` does."""
    store, secret = _open_store(settings, WORKER_PATIENCE_S, stack)
    site = site_of(settings.data_dir)
    joining = Joining(store, settings.files_dir, secret)
    member = FleetMember(store, name, site, Identity.of(model, engine), kv)
    while True:
        try:
            joining.join()
            member.beat()
            break
        except RedisRefused:
            raise
        except QueueUnavailable as error:
            joining.say(error)
            time.sleep(AGAIN_S)
    stack.callback(member.close)
    queue = RedisQueue(store, site=site, kv_bytes=kv.describe)
    stack.callback(queue.close)
    return WorkerBackend(queue, RedisDocuments(store, site=site), member, secret)


class Joining:
    """What must be right before a process may use this Redis and this folder together."""

    def __init__(self, store: RedisStore, files_dir: Path, secret: bytes) -> None:
        self._store = store
        self._files_dir = files_dir
        self._folder_id = blake3(b"foreword shared folder", key=secret).hexdigest()
        self._said_at = -SAY_S
        self.joined = False

    def join(self) -> None:
        """Raises QueueUnavailable, RedisRefused, ClusterRefused."""
        server = self._store.ask(lambda client: client.info("server"), patient=False)
        self._check_server(server["redis_version"])
        self._check_folder()
        self.joined = True
        log.info("Redis %s at %s, files in %s", server["redis_version"], self._store.url, self._files_dir)

    def say(self, error: QueueUnavailable) -> None:
        """Now and then."""
        if time.monotonic() - self._said_at >= SAY_S:
            self._said_at = time.monotonic()
            log.error("%s; it is tried again", error)

    def _check_server(self, version: str) -> None:
        if int(version.partition(".")[0]) < LEAST_VERSION:
            raise ClusterRefused(f"Redis at {self._store.url} is {version}: {LEAST_VERSION}.0 or newer is expected")
        memory = self._store.command("info", "memory")
        if memory.get("maxmemory_policy", "noeviction") != "noeviction":
            log.error(
                "Redis evicts keys (maxmemory-policy %s): jobs and documents will be lost; noeviction is expected",
                memory["maxmemory_policy"],
            )
        persistence = self._store.command("info", "persistence")
        if not persistence.get("aof_enabled"):
            log.error("Redis keeps no append-only file (appendonly no): a restart of it loses jobs and documents")

    def _check_folder(self) -> None:
        """One Redis and one folder belong together, or records would name bytes that aren't there."""
        name = self._store.key("folder")
        known = self._store.command("get", name)
        if known is None:
            documents = self._files_dir / "documents"
            if documents.is_dir() and any(documents.iterdir()):
                raise ClusterRefused(
                    f"{self._files_dir} holds documents that Redis at {self._store.url} knows nothing of: bring back "
                    "its append-only file, name the Redis that knows them, or empty the folder"
                )
            self._store.command("set", name, self._folder_id, nx=True)
            known = self._store.command("get", name)
        if known.decode() != self._folder_id:
            raise ClusterRefused(
                f"FOREWORD_SHARED_DIR {self._files_dir} is not the folder that the other processes of Redis at "
                f"{self._store.url} use"
            )


def _open_store(settings: Settings, patience_s: float, stack: ExitStack) -> tuple[RedisStore, bytes]:
    assert settings.redis_url is not None
    if settings.shared_dir is None:
        raise SharedDirMissing("FOREWORD_REDIS_URL is set: FOREWORD_SHARED_DIR, a folder all machines see, is expected")
    store = RedisStore(settings.redis_url, patience_s=patience_s)
    stack.callback(store.close)
    settings.files_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return store, load_secret(settings.files_dir)
