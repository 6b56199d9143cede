"""Deliveries of webhooks: tried again with growing pauses, given up at last; a hanging target holds up nobody else."""

import logging
import random
import time
from collections import Counter

from anyio import to_thread

from service.background import Held
from service.dependencies import Services
from service.documents.base import UnknownRecord
from service.objects.base import StoredObject, UnknownObject
from service.webhook_sender import Sender, Undelivered
from service.webhooks import FILE_EVENTS, FIRST_LOOK_S, announce

log = logging.getLogger(__name__)

DELAYS_S = (
    5.0,
    30.0,
    120.0,
    600.0,
    1800.0,
    3600.0,
    10_800.0,
    21_600.0,
)  # behind each failed attempt; then it is given up
MOST_A_TARGET = 4  # at once, in one process
GONE = 410  # the endpoint wants no more of it
LONGEST_LOOK_S = 5.0
UNMADE_S = 120.0  # a watch comes before its file


class DeliveryKeeper:
    """One attempt at a delivery that is due."""

    def __init__(self, services: Services, sender: Sender) -> None:
        self._objects = services.objects
        self._metrics = services.metrics
        self._sender = sender
        self._running: Counter[str] = Counter()

    async def __call__(self, held: Held) -> None:
        target = str(held.data["endpoint"])
        if self._running[target] >= MOST_A_TARGET:
            await held.put_off(random.uniform(0.5, 2.0))
            return
        self._running[target] += 1
        try:
            endpoint = await to_thread.run_sync(self._objects.get, "endpoint", held.stored.tenant, target)
            await self._attempt(held, endpoint)
        except UnknownObject:
            await held.delete()
        finally:
            self._running[target] -= 1
            if not self._running[target]:
                del self._running[target]

    async def _attempt(self, held: Held, endpoint: StoredObject) -> None:
        attempts = int(held.data["attempts"]) + 1
        try:
            status = await self._sender.send(endpoint, held.data["event_id"], held.data["body"])
            reason = f"status {status}"
        except Undelivered as error:
            status, reason = 0, str(error)
        if 200 <= status < 300:
            outcome = "delivered"
        elif status == GONE or attempts > len(DELAYS_S):
            outcome = "given_up"
        else:
            outcome = "failed"
        self._metrics.webhook_deliveries.labels(outcome).inc()
        if outcome == "failed":
            delay_s = DELAYS_S[attempts - 1] * random.uniform(0.8, 1.2)
            await held.save({"attempts": attempts}, due_at=time.time() + delay_s)
            log.info("webhook %s: attempt %d failed (%s)", held.stored.id, attempts, reason)
            return
        if outcome == "given_up":
            log.warning("webhook %s is given up after %d attempts: %s", held.stored.id, attempts, reason)
        await held.delete()


class FileWatch:
    """Tells the endpoints of a tenant what became of a file: looks at it until that is decided."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, held: Held) -> None:
        age_s = time.time() - held.stored.created_at
        event = await to_thread.run_sync(self._event, held.stored, age_s)
        if event == "":
            await held.put_off(min(max(FIRST_LOOK_S, age_s / 4), LONGEST_LOOK_S))
            return
        if event is not None:
            await to_thread.run_sync(announce, self._services.objects, held.stored.tenant, event, held.stored.id)
            self._services.background.nudge()
        await held.delete()

    def _event(self, stored: StoredObject, age_s: float) -> str | None:
        """What to announce; "" while nothing is decided, None where nothing ever will be."""
        try:
            file = self._services.documents.file(stored.tenant, stored.id)
        except UnknownRecord:
            return "" if age_s < UNMADE_S else None
        return FILE_EVENTS.get(file.status, "")
