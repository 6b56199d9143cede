"""One exchange: a chat request on its way through its files, the wait for them, the answer and the response."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.answers import Finished, Text, make_question, put_question, question_size, read_answer
from service.completions import Completion
from service.conversation import Conversation, decode_inline, read_conversation
from service.dependencies import Services
from service.intake import derived_id, take_inline
from service.middleware import admit_answer, principal_of
from service.payloads import origin_of
from service.quotes import QuoteCheck, verifier
from service.schemas import ChatRequest
from service.sse import EventStream, until_disconnect
from service.waiting import ReadyFile, Stage, Unready, look, wait_for_documents


async def respond(
    request: Request,
    services: Services,
    tenant: str,
    chat: ChatRequest,
    *,
    shape: Callable[[dict[str, Any]], dict[str, Any]] = lambda completion: completion,
    check_quotes: bool = False,
) -> Response:
    """The response to `chat`, streamed if it asks for that; `shape` turns a whole completion into what is returned.
    With `check_quotes` an answer quotes only what stands in its documents (service.quotes).

    What is wrong already, or too long, is said with a status code: raises ApiError. What turns out while documents are
    being waited for can only be said within the stream.
    """
    received_at = time.time()
    conversation = read_conversation(chat.messages)
    if principal_of(request.scope).limits.count_answers:
        size = await to_thread.run_sync(question_size, services, chat)
        await to_thread.run_sync(admit_answer, services.gate, request.scope, size.total)
    file_ids = await _file_ids(services, request, tenant, conversation)
    exchange = _Exchange(services, tenant, chat, conversation, file_ids, received_at, request)
    state = await to_thread.run_sync(look, services, tenant, file_ids)
    if not isinstance(state, Unready):
        await to_thread.run_sync(exchange.ready, state)
    steps = exchange.quoting if check_quotes else exchange.steps
    if chat.stream:
        return EventStream(exchange.completion.chunks(steps(), chat.stream_options))
    return JSONResponse(shape(await until_disconnect(request, lambda: exchange.completion.whole(steps()))))


class _Exchange:
    def __init__(
        self,
        services: Services,
        tenant: str,
        chat: ChatRequest,
        conversation: Conversation,
        file_ids: Sequence[str],
        received_at: float,
        request: Request,
    ) -> None:
        self._services = services
        self._tenant = tenant
        self._chat = chat
        self._conversation = conversation
        self._file_ids = file_ids
        self._received_at = received_at
        self._request = request
        self._key = request.headers.get("idempotency-key")
        name = secrets.token_hex(12) if self._key is None else derived_id(tenant, "chat", self._key)[-24:]
        self.completion = Completion(services, f"chatcmpl-{name}")

    def ready(self, files: Sequence[ReadyFile]) -> None:
        """The documents are known. Raises ContextLengthExceeded, InvalidRequest."""
        self.completion.question = make_question(self._services, self._conversation.messages, files, self._chat)

    async def steps(self) -> AsyncGenerator[Stage | Text | Finished, None]:
        waited = self.completion.question is None
        if waited:
            async with aclosing(wait_for_documents(self._services, self._tenant, self._file_ids)) as stages:
                async for stage in stages:
                    if isinstance(stage, Stage):
                        yield stage
                    else:
                        await to_thread.run_sync(self.ready, stage)
        assert self.completion.question is not None
        put = partial(
            put_question,
            self._services,
            self._tenant,
            self.completion.question,
            received_at=self._received_at,
            waited=waited,
            origin=origin_of(self._request.scope["state"]),
            idempotency_key=self._key,
            reader=self._services.reader,
        )
        job = await to_thread.run_sync(put)
        self.completion.created = int(job.created_at)
        async with aclosing(read_answer(self._services, job.id, self._received_at)) as answer:
            async for step in answer:
                yield step

    async def quoting(self) -> AsyncGenerator[Stage | Text | Finished, None]:
        """The same steps, without quotes that don't stand in the documents."""
        check: QuoteCheck | None = None
        async with aclosing(self.steps()) as steps:
            async for step in steps:
                if check is None and self.completion.question is not None:
                    check = QuoteCheck(verifier(self._services, self.completion.question.files))
                if isinstance(step, Text):
                    assert check is not None
                    if text := await to_thread.run_sync(check.take, step.text):
                        yield Text(text)
                elif isinstance(step, Finished):
                    assert check is not None
                    if text := await to_thread.run_sync(check.close):
                        yield Text(text)
                    self._services.metrics.quotes_checked(verified=len(check.quotes), dropped=check.dropped)
                    yield replace(step, text=check.text, quotes=check)
                else:
                    yield step


async def _file_ids(services: Services, request: Request, tenant: str, conversation: Conversation) -> list[str]:
    """Handles of all files; those given inline get one now."""
    ids: list[str] = []
    for reference in conversation.files:
        file_id = reference.file_id
        if file_id is None:
            name, data = await to_thread.run_sync(decode_inline, reference)
            file_id = (await take_inline(services, request, tenant, name, data)).id
        if file_id not in ids:
            ids.append(file_id)
    return ids
