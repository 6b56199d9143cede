"""The lines of a batch: checked all before the first is asked, then each asked as its endpoint would."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from anyio import to_thread

from service.answers import Finished, Question, follow_answer, make_question, put_question, question_size
from service.completions import Completion
from service.conversation import handles_of, read_conversation
from service.dependencies import Services, load_json
from service.errors import ApiError, InvalidRequest, NotFound, UnsupportedOption, translate
from service.intake import derived_id
from service.objects.base import StoredObject
from service.payloads import origin_of
from service.queue.base import QueueError, UnknownJob
from service.response_records import earlier_turns
from service.response_schemas import parse_response
from service.response_views import response_view
from service.schemas import ChatRequest, parse_chat
from service.waiting import ReadyFile, Stage, wait_for_documents

PRIORITY = 0  # behind everything that somebody waits for
MAX_LINES = 50_000
MAX_LINE_BYTES = 1 << 20
MAX_ERRORS = 100  # more than that are not told
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@dataclass(frozen=True)
class Line:
    number: int  # from 1
    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Flaw:
    line: int | None
    code: str
    message: str
    param: str | None = None

    def view(self) -> dict[str, Any]:
        return {"line": self.line, "code": self.code, "message": self.message, "param": self.param}


def read_lines(path: Path, endpoint: str) -> Iterator[Line | Flaw]:
    """Every line or what is wrong with it. Raises OSError."""
    seen: set[str] = set()
    with path.open("rb") as source:
        number = 0
        while text := source.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(text) > MAX_LINE_BYTES:
                yield Flaw(number, "line_too_long", f"a line may have {MAX_LINE_BYTES} bytes")
                return
            if number > MAX_LINES:
                yield Flaw(number, "too_many_lines", f"a batch may have {MAX_LINES} lines")
                return
            if text.strip():
                line = _read_line(number, text, endpoint, seen)
                yield line
                if isinstance(line, Line):
                    seen.add(line.custom_id)


def _read_line(number: int, text: bytes, endpoint: str, seen: set[str]) -> Line | Flaw:
    try:
        value = load_json(text.decode())
    except ValueError as error:
        return Flaw(number, "invalid_json_line", f"the line is not valid JSON: {error}")
    if not isinstance(value, dict):
        return Flaw(number, "invalid_json_line", f"a JSON object is expected, got {type(value).__name__}")
    custom_id, body = value.get("custom_id"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return Flaw(number, "missing_required_parameter", "a string is expected", "custom_id")
    if custom_id in seen:
        return Flaw(number, "duplicate_custom_id", f"{custom_id!r} stands on an earlier line too", "custom_id")
    if value.get("method") != "POST":
        return Flaw(number, "invalid_method", f"'POST' is expected, got {value.get('method')!r}", "method")
    if value.get("url") != endpoint:
        return Flaw(number, "mismatched_endpoint", f"{endpoint!r} is expected, got {value.get('url')!r}", "url")
    if not isinstance(body, dict):
        return Flaw(number, "missing_required_parameter", "a JSON object is expected", "body")
    return Line(number, custom_id, body)


class LineRunner:
    """Asks one line after the other; several may run at once."""

    def __init__(self, services: Services, batch: StoredObject) -> None:
        self._services = services
        self._batch = batch
        self._origin = origin_of(batch.data["origin"])
        self._shape = self._chat if batch.data["endpoint"] == CHAT else self._response

    def job_id(self, line: Line) -> str:
        return f"answer-{self._batch.id}-{line.number}"

    async def answer(self, line: Line) -> dict[str, Any]:
        """The row of this line; what is wrong with it is its row. Raises QueueError: then nothing was decided."""
        try:
            status, body = 200, await self._shape(line)
        except QueueError as error:
            if not isinstance(error, UnknownJob):
                raise
            status, body = self._refused(InvalidRequest("its job was forgotten before it was read"))
        except Exception as error:
            known = translate(error)
            if known is None:
                raise
            status, body = self._refused(known)
        return self._row(line, {"status_code": status, "request_id": self.job_id(line), "body": body}, None)

    def unanswered(self, line: Line, code: str, message: str) -> dict[str, Any]:
        return self._row(line, None, {"code": code, "message": message})

    def end(self, line: Line) -> None:
        """Nobody waits for it any more."""
        try:
            self._services.queue.cancel(self.job_id(line))
        except UnknownJob:
            return

    def _row(self, line: Line, response: Any, error: Any) -> dict[str, Any]:
        name = derived_id(self._batch.tenant, self._batch.id, str(line.number))[-24:]
        return {"id": f"batch_req_{name}", "custom_id": line.custom_id, "response": response, "error": error}

    @staticmethod
    def _refused(error: ApiError) -> tuple[int, dict[str, Any]]:
        return error.status, error.body()

    async def _chat(self, line: Line) -> dict[str, Any]:
        chat = parse_chat(line.body)
        self._check(chat.model, streams=chat.stream)
        question, finished = await self._ask(line, chat)
        name = derived_id(self._batch.tenant, self.job_id(line))[-24:]
        return await Completion(self._services, f"chatcmpl-{name}", question).finished(finished)

    async def _response(self, line: Line) -> dict[str, Any]:
        wanted = parse_response(line.body)
        self._check(wanted.model, streams=wanted.stream or wanted.background)
        services, tenant = self._services, self._batch.tenant
        earlier = await to_thread.run_sync(earlier_turns, services, tenant, wanted.previous_response_id)
        chat = wanted.as_chat(earlier)
        size = await to_thread.run_sync(question_size, services, chat)
        await self._ask(line, chat)
        plain = {**wanted.model_dump(exclude_unset=True, mode="json"), "store": False, "background": False}
        data = {
            "request": plain,
            "status": "asked",
            "asked_at": time.time(),
            "job_id": self.job_id(line),
            "files": handles_of(chat),
            "question_tokens": size.question,
        }
        name = 2 * derived_id(tenant, self.job_id(line))[-24:]
        draft = StoredObject("response", tenant, f"resp_{name}", data, 0, time.time(), None)
        return await to_thread.run_sync(response_view, services, draft)

    def _check(self, model: str, *, streams: bool) -> None:
        if model not in self._services.model.aliases:
            raise NotFound(f"The model '{model}' does not exist.", param="model", code="model_not_found")
        if streams:
            raise UnsupportedOption("a line of a batch can't be streamed, nor made in the background", param="stream")

    async def _ask(self, line: Line, chat: ChatRequest) -> tuple[Question, Finished]:
        services, tenant, now = self._services, self._batch.tenant, time.time()
        files, waited = await self._documents(handles_of(chat))
        messages = read_conversation(chat.messages).messages
        question = await to_thread.run_sync(make_question, services, messages, files, chat)
        put = partial(
            put_question,
            services,
            tenant,
            question,
            received_at=now,
            waited=waited,
            origin=self._origin,
            job_id=self.job_id(line),
            priority=PRIORITY,
        )
        job = await to_thread.run_sync(put)
        async with aclosing(follow_answer(services, job.id, now)) as steps:
            async for step in steps:
                if isinstance(step, Finished):
                    return question, step
        raise AssertionError("an answer ends with Finished or an error")

    async def _documents(self, file_ids: list[str]) -> tuple[list[ReadyFile], bool]:
        """Them, and whether they had to be waited for."""
        waited = False
        documents: AsyncGenerator[Stage | list[ReadyFile], None] = wait_for_documents(
            self._services, self._batch.tenant, file_ids
        )
        async with aclosing(documents):
            async for step in documents:
                if not isinstance(step, Stage):
                    return step, waited
                waited = True
        raise AssertionError("waiting ends with documents or an error")
