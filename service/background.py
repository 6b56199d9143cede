"""Work of the API that outlives its request: what is due is claimed, done in a task, and found again after a crash.

Each kind of object (service.objects) has a keeper: a coroutine that is handed a claimed object, and puts it off,
replaces or deletes it. A keeper that dies with its process leaves a lease that runs out, and another process goes on.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from anyio import to_thread

from service.limits.gate import RENEW_S, Gate
from service.objects.base import Json, ObjectChanged, ObjectKind, Objects, StoredObject

log = logging.getLogger(__name__)

TICK_S = 0.5
LEASE_S = 20.0
RENEWED_S = 2.0  # also how soon a change by somebody else is noticed


@dataclass(frozen=True)
class Keeper:
    keep: Callable[["Held"], Awaitable[None]]
    most: int  # at once, in one process


class Held:
    """A claimed object. Every change goes by its version: ObjectChanged says that it is no longer ours."""

    def __init__(self, objects: Objects, stored: StoredObject) -> None:
        self._objects = objects
        self._lock = asyncio.Lock()
        self._lost = False
        self.stored = stored

    @property
    def data(self) -> Json:
        return self.stored.data

    async def save(self, change: Json, *, due_at: float | None) -> None:
        """Change some fields; `due_at` says when it is to be looked after next. Raises ObjectChanged."""
        async with self._lock:
            data = {**self.stored.data, **change}
            self.stored = await to_thread.run_sync(lambda: self._objects.replace(self.stored, data, due_at=due_at))

    async def put_off(self, delay_s: float) -> None:
        await self.save({}, due_at=time.time() + delay_s)

    async def delete(self) -> None:
        await to_thread.run_sync(self._objects.delete, self.stored.kind, self.stored.tenant, self.stored.id)

    def check(self) -> None:
        """Raises ObjectChanged once `renewed` has found out that somebody else changed the object."""
        if self._lost:
            raise ObjectChanged(f"{self.stored.kind} {self.stored.id!r} was changed by somebody else")

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """The lease lasts as long as the block, which must `check` now and then."""
        renewing = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            renewing.cancel()

    async def _renew(self) -> None:
        while not self._lost:
            await asyncio.sleep(RENEWED_S)
            try:
                await self.save({}, due_at=time.time() + LEASE_S)
            except ObjectChanged:
                self._lost = True
            except Exception:  # the store may be back before the lease runs out
                log.exception("lease of %s %s not renewed", self.stored.kind, self.stored.id)


class Background:
    """Open for as long as the application runs."""

    def __init__(self, objects: Objects, gate: Gate) -> None:
        self._objects = objects
        self._gate = gate
        self._keepers: Mapping[ObjectKind, Keeper] = {}
        self._tasks: dict[asyncio.Task[None], ObjectKind] = {}
        self._started: set[asyncio.Task[None]] = set()  # those of them that this process's requests began
        self._wake = asyncio.Event()

    @asynccontextmanager
    async def running(self, keepers: Mapping[ObjectKind, Keeper]) -> AsyncIterator[None]:
        self._keepers = keepers
        loop = asyncio.create_task(self._run(), name="background")
        try:
            yield
        finally:
            for task in (loop, *self._tasks):
                task.cancel()
            await asyncio.gather(loop, *self._tasks, return_exceptions=True)

    def nudge(self) -> None:
        """Something is due now: don't wait for the next tick."""
        self._wake.set()

    def start(self, stored: StoredObject) -> None:
        """Keep an object that this process has just made; its `due_at` is the lease.

        It takes no room of what is due: a hundred responses that wait for a document hold up nobody's that has ended.
        """
        self._started.add(self._spawn(stored, self._keepers[stored.kind]))

    async def _run(self) -> None:
        renewed_at = time.monotonic()
        while True:
            try:
                for kind, keeper in self._keepers.items():
                    await self._claim(kind, keeper)
                if time.monotonic() - renewed_at >= RENEW_S:
                    renewed_at = time.monotonic()
                    await to_thread.run_sync(self._gate.renew)
            except Exception:  # the store may be away for a while
                log.exception("background work goes on after an error")
            try:
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _claim(self, kind: ObjectKind, keeper: Keeper) -> None:
        room = keeper.most - sum(of == kind for task, of in self._tasks.items() if task not in self._started)
        if room > 0:
            claim = lambda: self._objects.claim_due(kind, lease_s=LEASE_S, limit=room)  # noqa: E731
            for stored in await to_thread.run_sync(claim):
                self._spawn(stored, keeper)

    def _spawn(self, stored: StoredObject, keeper: Keeper) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._keep(keeper, Held(self._objects, stored)))
        self._tasks[task] = stored.kind
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._started.discard(task)
        if self._tasks.pop(task) in ("delivery", "watch"):
            self.nudge()

    async def _keep(self, keeper: Keeper, held: Held) -> None:
        try:
            await keeper.keep(held)
        except ObjectChanged:
            log.info("%s %s was changed by somebody else", held.stored.kind, held.stored.id)
            self.nudge()
        except Exception:  # its lease runs out, and it is tried again
            log.exception("%s %s failed", held.stored.kind, held.stored.id)
