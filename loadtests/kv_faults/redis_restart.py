"""Redis killed and started again under the tier that lies in it, while one machine writes and another reads."""

import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from engine.chain import Segment
from engine.kv_store import DiskLimits, LocalKVStore, SharedSettings, TieredKVStore, with_shared_tiers
from engine.kv_store.tiered import LEFT_ALONE_S
from loadtests.kv_documents import read, write
from loadtests.kv_faults.bench import CAP_BYTES, DOCUMENTS, LAYOUT, REFUSALS, Book
from loadtests.redis_server import RedisServer

KIND = "redis_restart"


class RedisBench:
    """Two machines' stores before one redis-server, closed behind the block."""

    def __init__(self, folder: Path, rng: random.Random, book: Book) -> None:
        self._folder, self._rng, self._book = folder, rng, book
        self._now = 0.0
        self._server = RedisServer(folder / "redis")

    def __enter__(self) -> "RedisBench":
        self._server.start()
        self._writer, self._reader = self._machine("writer"), self._machine("reader")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        self._reader.close()
        self._server.__exit__(None, None, None)

    def _machine(self, name: str) -> TieredKVStore:
        local = LocalKVStore(self._folder / name, LAYOUT, DiskLimits(CAP_BYTES))
        tiers = SharedSettings(redis_url=self._server.url, redis_bytes=CAP_BYTES, redis_document_bytes=CAP_BYTES)
        pending = self._folder / f"{name}-pending"
        return with_shared_tiers(local, tiers, pending, monotonic=lambda: self._now)

    def restart(self) -> None:
        """One fault, at a random moment of a write, a copy or a read."""
        links = self._rng.choice(DOCUMENTS)
        self._forget(links)
        errors = self._errors()
        if self._rng.random() < 0.5:
            self._store(links)
            target = self._read
        else:
            target = self._store
        worker = threading.Thread(target=self._guarded, args=(target, links))
        worker.start()
        time.sleep(self._rng.random() * 0.02)
        self._server.kill()
        if self._rng.random() < 0.3:  # one that keeps nothing
            shutil.rmtree(self._folder / "redis" / "appendonlydir", ignore_errors=True)
        if self._rng.random() < 0.5:
            worker.join()
        self._server.start()
        worker.join()
        self._writer.drain()
        self._reader.drain()
        self._book.injected[KIND] += 1
        self._book.noticed[KIND] += self._errors() > errors
        self._now += LEFT_ALONE_S
        self._mend(links)

    def _forget(self, links: list[Segment]) -> None:
        for store in (self._writer, self._reader):
            store.attach(links, "document", ttl_s=None, pinned=False)
            store.release("document")
        self._reader.drain()

    def _store(self, links: list[Segment]) -> None:
        write(self._writer, links, owner="job")
        self._writer.attach(links, "document", ttl_s=None, pinned=False)
        self._writer.drain()

    def _read(self, links: list[Segment]) -> None:
        served = read(self._reader, links)
        self._book.blocks_compared += served.blocks
        self._book.wrong_kv += served.wrong

    def _guarded(self, target: Callable[[list[Segment]], None], links: list[Segment]) -> None:
        try:
            target(links)
        except REFUSALS:
            self._book.refused[KIND] += 1
        except Exception as error:
            self._book.crashes.append(f"{KIND}: {error!r}")

    def _mend(self, links: list[Segment]) -> None:
        """Whatever is there now is right, and the tier serves again what is written again."""
        self._read(links)
        self._forget(links)
        self._store(links)
        served = read(self._reader, links)
        self._book.blocks_compared += served.blocks
        self._book.wrong_kv += served.wrong
        if served.segments < len(links):
            self._book.unsound.append(f"{KIND}: {served.segments} of {len(links)} segments behind the restart")

    def _errors(self) -> int:
        return sum(store.counters.get("shared_errors") for store in (self._writer, self._reader))
