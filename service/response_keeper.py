"""Sees background responses to their end: asks when the process that should have died, announces, forgets in time."""

import contextlib
import time
from contextlib import aclosing

from anyio import to_thread

from service.background import Held
from service.dependencies import Services
from service.errors import NotFound, RateLimited
from service.limits.gate import RENEW_S
from service.queue.base import FINAL_STATES, UnknownJob
from service.response_asking import FIRST_LOOK_S, ask_when_ready, put
from service.response_records import INTERRUPTED, KEPT_S, asker_of, question_of, read_chat, standing
from service.waiting import Unready, look
from service.webhooks import announce

LONGEST_LOOK_S = 5.0


class ResponseKeeper:
    """Sees background responses to their end, and forgets all of them in time."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, held: Held) -> None:
        data = held.data
        if data.get("over") or held.stored.created_at + KEPT_S <= time.time():
            await held.delete()
            if not data["request"]["store"]:
                await to_thread.run_sync(self._services.queue.scrub, data["job_id"])
        elif data["status"] == "waiting" and not data["request"]["background"]:
            await held.save({"status": "failed", "error": INTERRUPTED, "over": True}, due_at=self._forgotten_at(held))
        elif data["status"] == "waiting":
            held_at = 0.0
            async with held.renewed(), aclosing(ask_when_ready(self._services, held)) as stages:
                async for _ in stages:
                    if time.monotonic() - held_at > RENEW_S:
                        held_at = time.monotonic()
                        await to_thread.run_sync(self._hold_slot, held)
            self._services.background.nudge()
        else:
            await self._look(held)

    async def _look(self, held: Held) -> None:
        if not await to_thread.run_sync(self._has_ended, held):
            await to_thread.run_sync(self._hold_slot, held)
            age_s = time.time() - (held.data["asked_at"] or held.stored.created_at)
            await held.put_off(min(max(FIRST_LOOK_S, age_s / 4), LONGEST_LOOK_S))
            return
        if held.data["request"]["background"]:
            await to_thread.run_sync(self._announce, held)
        await held.save({"over": True}, due_at=self._forgotten_at(held))

    def _has_ended(self, held: Held) -> bool:
        if held.data["status"] != "asked":
            return True
        try:
            return self._services.queue.get(held.data["job_id"]).state in FINAL_STATES
        except UnknownJob:  # the server died between the record and the job
            chat = read_chat(self._services, held.stored)
            files = look(self._services, held.stored.tenant, held.data["files"])
            if not isinstance(files, Unready):
                put(self._services, held.stored, question_of(self._services, chat, files), waited=True)
            return False

    def _announce(self, held: Held) -> None:
        try:
            event = f"response.{standing(self._services, held.stored).status}"
        except NotFound:  # its document is deleted
            event = "response.failed"
        announce(self._services.objects, held.stored.tenant, event, held.stored.id)
        self._services.gate.free(asker_of(held.stored), "answers", held.stored.id)

    def _hold_slot(self, held: Held) -> None:
        """The slot that the request took is kept by whichever process keeps the response."""
        with contextlib.suppress(RateLimited):  # it had died with a process, and others came first
            self._services.gate.hold(asker_of(held.stored), "answers", held.stored.id, renewed=False)

    @staticmethod
    def _forgotten_at(held: Held) -> float:
        return held.stored.created_at + KEPT_S
