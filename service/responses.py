"""Responses: made from a request, asked as a chat's question is, followed and ended; the background ones seen to it."""

import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio
from anyio import to_thread
from starlette.requests import Request

from service.answers import Question, question_size
from service.auth import Principal
from service.background import LEASE_S, Held
from service.conversation import decode_inline, handles_of
from service.dependencies import Services
from service.errors import ApiError, ContextLengthExceeded, NotFound, TooLarge
from service.intake import derived_id, take_inline
from service.middleware import admit_answer
from service.objects.base import Json, ObjectChanged, ObjectExists, StoredObject, UnknownObject
from service.payloads import origin_of
from service.response_asking import FIRST_LOOK_S, ask_when_ready, end_job, put
from service.response_records import (
    KEPT_S,
    asker_of,
    find_response,
    question_of,
    read_chat,
    standing,
)
from service.response_schemas import ResponseRequest
from service.response_views import response_events, response_view
from service.schemas import FileReference
from service.waiting import Stage, Unready, look, wait_for_documents

MAX_ASKED_BYTES = 8 << 20


class Responses:
    """The responses of one API process."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, request: Request, principal: Principal, wanted: ResponseRequest) -> "Live":
        """Make, and ask at once if its documents are ready. Raises ApiError for all that is wrong by now."""
        services, tenant = self._services, principal.tenant
        wanted = await self._with_handles(request, tenant, wanted)
        draft = await to_thread.run_sync(self._draft, request, tenant, wanted)
        chat = await to_thread.run_sync(read_chat, services, draft)
        files = handles_of(chat)
        size = await to_thread.run_sync(question_size, services, chat)
        if size.question >= services.model.max_positions:  # said now: its documents may take long
            raise ContextLengthExceeded(
                limit=services.model.max_positions,
                prompt_tokens=size.question,
                max_tokens=wanted.max_output_tokens or 1,
            )
        data = {**draft.data, "files": files, "question_tokens": size.question}
        state = await to_thread.run_sync(look, services, tenant, files)
        question = None if isinstance(state, Unready) else await to_thread.run_sync(question_of, services, chat, state)
        slot = draft.id if wanted.background else None
        await to_thread.run_sync(admit_answer, services.gate, request.scope, size.total, slot)
        live, is_new = await to_thread.run_sync(self._begin, draft, data, question)
        if is_new and wanted.background and question is None:
            services.background.start(live.stored)
        return live

    def find(self, tenant: str, response_id: str) -> StoredObject:
        """Raises NotFound."""
        return find_response(self._services, tenant, response_id)

    def view(self, stored: StoredObject) -> Json:
        return response_view(self._services, stored)

    def follow(self, stored: StoredObject, starting_after: int) -> AsyncGenerator[str, None]:
        """Events of a response that others make; leaving changes nothing."""
        return Live(self._services, Held(self._services.objects, stored), drives=False).events(starting_after)

    def cancel(self, tenant: str, response_id: str) -> StoredObject:
        """Nothing happens where it has ended. Raises NotFound."""
        while True:
            stored = self.find(tenant, response_id)
            if standing(self._services, stored).ended:
                return stored
            change = {"status": "cancelled", "error": None}
            try:
                ended = self._services.objects.replace(stored, {**stored.data, **change}, due_at=time.time())
            except ObjectChanged:
                continue
            end_job(self._services, stored)
            return ended

    def delete(self, tenant: str, response_id: str) -> None:
        """With all that it said. Raises NotFound."""
        stored = self.find(tenant, response_id)
        self._services.objects.delete("response", tenant, response_id)
        self._services.queue.scrub(stored.data["job_id"])
        self._services.gate.free(asker_of(stored), "answers", response_id)

    async def _with_handles(self, request: Request, tenant: str, wanted: ResponseRequest) -> ResponseRequest:
        """The same with a handle for each file that is given inline."""
        messages = []
        for message in wanted.input:
            if isinstance(message.content, str) or not message.files:
                messages.append(message)
                continue
            parts = list(message.content)
            for place, part in enumerate(parts):
                if part.type == "input_file" and part.file_data is not None:
                    reference = FileReference(file_data=part.file_data, filename=part.filename)
                    name, content = await to_thread.run_sync(decode_inline, reference)
                    file = await take_inline(self._services, request, tenant, name, content)
                    parts[place] = part.model_copy(update={"file_id": file.id, "file_data": None})
            messages.append(message.model_copy(update={"content": parts}))
        return wanted.model_copy(update={"input": messages})

    def _draft(self, request: Request, tenant: str, wanted: ResponseRequest) -> StoredObject:
        """What is known before the conversation is; not stored yet."""
        key = request.headers.get("idempotency-key")
        name = secrets.token_hex(24) if key is None else 2 * derived_id(tenant, "response", key)[-24:]
        plain = wanted.model_dump(exclude_unset=True, mode="json")
        if plain.get("seed") is None:
            plain["seed"] = secrets.randbelow(2**31)  # another attempt must say the same
        plain |= {"store": wanted.store, "background": wanted.background}
        plain.pop("stream", None)
        if len(json.dumps(plain)) > MAX_ASKED_BYTES:
            raise TooLarge(
                f"what a response is asked is kept, and may have {MAX_ASKED_BYTES} bytes beside its files",
                code="request_too_large",
            )
        now, principal = time.time(), request.scope["state"]["principal"]
        data: Json = {
            "request": plain,
            "status": "waiting",
            "error": None,
            "job_id": f"answer-{name}",
            "received_at": now,
            "asked_at": None,
            "files": [],
            "question_tokens": 0,
            "origin": dict(origin_of(request.scope["state"])),
            "key": {"id": principal.key_id, "answers": principal.limits.concurrent_answers},
        }
        return StoredObject("response", tenant, f"resp_{name}", data, 0, now, None)

    def _begin(self, draft: StoredObject, data: Json, question: Question | None) -> tuple["Live", bool]:
        """The response, and whether it was made now rather than by the same request, sent before."""
        services, background = self._services, data["request"]["background"]
        now = time.time()
        if question is not None:
            data = {**data, "status": "asked", "asked_at": now}
            due_at = now + (FIRST_LOOK_S if background else KEPT_S)
        else:
            due_at = now + LEASE_S
        try:
            stored = services.objects.create("response", draft.tenant, draft.id, data, due_at=due_at)
        except ObjectExists:
            stored = services.objects.get("response", draft.tenant, draft.id)
            return Live(services, Held(services.objects, stored), drives=False), False
        if question is not None:
            put(services, stored, question, waited=False)
        return Live(services, Held(services.objects, stored), drives=not background), True


class Live:
    """A response on its way, for those who wait for it. Who `drives` a response ends it by leaving."""

    def __init__(self, services: Services, held: Held, *, drives: bool) -> None:
        self._services = services
        self._held = held
        self._drives = drives

    @property
    def stored(self) -> StoredObject:
        return self._held.stored

    async def whole(self) -> Json:
        """The response once it has ended."""
        view = None
        try:
            async with aclosing(self._pieces()) as pieces:
                async for _ in pieces:
                    pass
            view = await to_thread.run_sync(response_view, self._services, self.stored)
        finally:
            await self._leave(ended=view is not None)
        return view

    async def events(self, starting_after: int = -1) -> AsyncGenerator[str, None]:
        """Server-sent events, to the end."""
        ended = False
        try:
            async with aclosing(self._pieces(starting_after)) as pieces:
                async for piece in pieces:
                    yield piece
            ended = True
        finally:
            await self._leave(ended=ended)

    def _pieces(self, starting_after: int = -1) -> AsyncGenerator[str, None]:
        return response_events(
            self._services,
            self.stored,
            reload=self._reload,
            waiting=self._waiting(),
            starting_after=starting_after,
        )

    async def _leave(self, *, ended: bool) -> None:
        if self._drives:
            with anyio.CancelScope(shield=True):  # the client may be gone, and with it this task's scope
                await to_thread.run_sync(self._close, ended)

    async def _waiting(self) -> AsyncGenerator[Stage, None]:
        """Until it is asked or has failed: by ourselves if we drive it, else by whoever does."""
        if self.stored.data["status"] != "waiting":
            return
        if self._drives:
            async with self._held.renewed(), aclosing(ask_when_ready(self._services, self._held)) as stages:
                async for stage in stages:
                    yield stage
            return
        while await to_thread.run_sync(self._is_waiting):
            async with aclosing(self._watch()) as stages:
                async for stage in stages:
                    yield stage
                    if not await to_thread.run_sync(self._is_waiting):
                        return
            await anyio.sleep(0.05)

    async def _watch(self) -> AsyncGenerator[Stage, None]:
        documents = wait_for_documents(self._services, self.stored.tenant, self.stored.data["files"])
        try:
            async with aclosing(documents):
                async for stage in documents:
                    if isinstance(stage, Stage):
                        yield stage
        except ApiError:
            return  # whoever drives it says so

    def _is_waiting(self) -> bool:
        return bool(self._reload().data["status"] == "waiting")

    def _reload(self) -> StoredObject:
        stored = self.stored
        try:
            self._held.stored = self._services.objects.get("response", stored.tenant, stored.id)
        except UnknownObject as error:
            raise NotFound("the response was deleted", param="response_id", code="response_not_found") from error
        return self.stored

    def _close(self, ended: bool) -> None:
        services, stored = self._services, self.stored
        if not ended:
            try:
                data = {**self._reload().data, "status": "cancelled", "error": None}
                services.objects.replace(self.stored, data, due_at=time.time() + KEPT_S)
            except (ObjectChanged, NotFound):
                pass
            end_job(services, stored)
        if not stored.data["request"]["store"]:
            services.objects.delete("response", stored.tenant, stored.id)
            services.queue.scrub(stored.data["job_id"])
