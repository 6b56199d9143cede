"""Answers: the job that makes one, and its text as it comes. Nobody reading means nobody computing."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

import anyio
from anyio import to_thread

from engine.interfaces import SamplingParams
from service.conversation import read_conversation
from service.dependencies import Services
from service.documents.base import UnknownRecord
from service.errors import ContextLengthExceeded, InternalError, InvalidRequest, NotFound, StorageExhausted
from service.intake import derived_id
from service.payloads import ANSWER_PRIORITY, AnswerPayload, Origin
from service.prompt import Message
from service.queue.base import SCRUBBED, Event, Job, NewJob, UnknownJob
from service.quotes import QuoteCheck
from service.schemas import ChatRequest
from service.sse import HEARTBEAT_S
from service.templates import TemplateError
from service.waiting import ReadyFile, Stage

# Seeds are made here, so that an answer taken over by another worker goes on with the same words.
_SEEDS = 2**31


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Finished:
    """The answer is complete. `result` is service.payloads.AnswerResult; `quotes` is there if they were checked."""

    text: str
    ttft_s: float
    result: dict[str, Any]
    quotes: QuoteCheck | None = None


@dataclass(frozen=True)
class Question:
    """A question ready to be put: tokens counted, documents known."""

    files: Sequence[ReadyFile]
    tokens: list[int]
    prompt_tokens: int
    fidelity: str
    sampling: SamplingParams


def make_question(
    services: Services, messages: Sequence[Message], files: Sequence[ReadyFile], request: ChatRequest
) -> Question:
    """Tokenize and check the length. Raises ContextLengthExceeded, InvalidRequest."""
    prompts = services.model.prompts
    try:
        tokens = prompts.question(messages, with_documents=bool(files)).tolist()
    except (ValueError, TemplateError) as error:
        raise InvalidRequest(f"messages: {error}", param="messages") from error
    prompt_tokens = prompts.prefix_length([ready.document.num_tokens for ready in files]) + len(tokens)
    limit = services.model.max_positions
    asked = request.max_completion_tokens or request.max_tokens
    max_tokens = asked or min(services.settings.max_tokens_default, max(1, limit - prompt_tokens))
    if prompt_tokens + max_tokens > limit:
        raise ContextLengthExceeded(limit=limit, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    sampling = SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        repetition_penalty=request.repetition_penalty,
        seed=secrets.randbelow(_SEEDS) if request.seed is None else request.seed,
        max_tokens=max_tokens,
        stop=tuple(request.stop or ()),
    )
    fidelity = request.fidelity or (files[0].file.fidelity if files else "default")
    return Question(files, tokens, prompt_tokens, fidelity, sampling)


@dataclass(frozen=True)
class QuestionSize:
    """In tokens: without documents, and what the answer may have."""

    question: int
    answer: int

    @property
    def total(self) -> int:
        return self.question + self.answer


def question_size(services: Services, request: ChatRequest) -> QuestionSize:
    """What a question counts against its key's limits, known before its documents are. Raises InvalidRequest."""
    conversation = read_conversation(request.messages)
    try:
        tokens = services.model.prompts.question(conversation.messages, with_documents=bool(conversation.files))
    except (ValueError, TemplateError) as error:
        raise InvalidRequest(f"messages: {error}", param="messages") from error
    asked = request.max_completion_tokens or request.max_tokens or services.settings.max_tokens_default
    return QuestionSize(len(tokens), asked)


def put_question(
    services: Services,
    tenant: str,
    question: Question,
    *,
    received_at: float,
    waited: bool,
    origin: Origin,
    job_id: str | None = None,
    idempotency_key: str | None = None,
    priority: int = ANSWER_PRIORITY,
    reader: str | None = None,
) -> Job:
    """The job that answers, put now or, under the same `job_id` or key, before. `received_at` in unix seconds.

    With `reader` (`services.reader`) it ends with that process: nobody else will read it.
    """
    payload: AnswerPayload = {
        "documents": [ready.document.id for ready in question.files],
        "question": question.tokens,
        "fidelity": question.fidelity,
        "sampling": asdict(question.sampling),
        "received_at": received_at,
        "waited": waited,
        **origin,
    }

    def put(job_id: str | None) -> Job:
        job = NewJob(
            kind="answer",
            tenant=tenant,
            payload=payload,
            priority=priority,
            cost_tokens=len(payload["question"]) + payload["sampling"]["max_tokens"],
            job_id=job_id,
            max_attempts=services.settings.max_attempts,
            # Whoever holds the first document's KV has the longest part of the prefix.
            affinity=f"{payload['documents'][0]}:{payload['fidelity']}" if payload["documents"] else None,
            reader=reader,
        )
        return services.queue.put(job)

    if idempotency_key is None:
        return put(job_id)
    # The same key with another question is not the same request.
    asked = json.dumps([payload["documents"], payload["question"], payload["fidelity"]])
    base = derived_id(tenant, "answer", idempotency_key, asked).replace("file-", "answer-")
    # An attempt that was cancelled or failed must not be what a retry is given.
    for attempt in range(100):
        try:
            job = services.queue.get(f"{base}-{attempt}")
        except UnknownJob:
            return put(f"{base}-{attempt}")
        if job.state in ("queued", "running", "succeeded") and job.payload != SCRUBBED:
            return put(job.id)  # which changes nothing but who reads it
    return put(None)


async def read_answer(
    services: Services, job_id: str, received_at: float
) -> AsyncGenerator[Stage | Text | Finished, None]:
    """The answer as it is made; closing the generator early cancels the job, unless somebody else reads it too.

    Raises InternalError and what the worker refused.
    """
    readers = services.answer_readers
    readers[job_id] += 1
    finished = False
    try:
        async with aclosing(follow_answer(services, job_id, received_at)) as steps:
            async for step in steps:
                finished = isinstance(step, Finished)
                yield step
    finally:
        readers[job_id] -= 1
        if not readers[job_id]:
            del readers[job_id]
            if not finished:
                # The client is gone, and with it the scope that this task runs in.
                with anyio.CancelScope(shield=True):
                    await to_thread.run_sync(_cancel, services, job_id)


def _cancel(services: Services, job_id: str) -> None:
    try:
        services.queue.cancel(job_id)
    except UnknownJob:
        return


async def follow_answer(
    services: Services, job_id: str, received_at: float
) -> AsyncGenerator[Stage | Text | Finished, None]:
    """Events of an answer job as steps; a Stage at least every HEARTBEAT_S while there is no text.

    Who reads the same job again gets the same texts. Raises what ended it, if that wasn't success, and UnknownJob.
    """
    seq, sent, attempt, ttft_s = 0, "", "", None
    while True:
        events = await services.queue.events_async(job_id, seq, timeout_s=HEARTBEAT_S)
        if not events:
            yield Stage("answer")
        for event in events:
            seq = event.seq
            if event.type == "state":
                attempt = ""
            elif event.type == "progress":
                yield _stage(event)
            elif event.type == "token":
                ttft_s = time.time() - received_at if ttft_s is None else ttft_s
                attempt += event.data["text"]
                # Another worker may have begun again: it repeats what was sent before it goes on.
                if not (attempt.startswith(sent) or sent.startswith(attempt)):
                    raise InternalError("the answer was begun again and came out different", code="answer_failed")
                if len(attempt) > len(sent):
                    yield Text(attempt[len(sent) :])
                    sent = attempt
            elif event.type == "done":
                end = await to_thread.run_sync(_finish, services, job_id, event, sent, ttft_s)
                if len(end.text) > len(sent):
                    yield Text(end.text[len(sent) :])
                yield end
                return


def _stage(event: Event) -> Stage:
    return Stage(str(event.data.get("stage", "prefill")), event.data.get("progress"), event.data.get("eta_s"))


def _finish(services: Services, job_id: str, event: Event, sent: str, ttft_s: float | None) -> Finished:
    """Raises what ended the job, if that wasn't success."""
    if event.data["state"] == "succeeded":
        result = dict(services.queue.get(job_id).result or {})
        if result == SCRUBBED:
            raise NotFound(
                "its document was deleted, and the answer with it", code="document_deleted", param="messages"
            )
        return Finished(str(result.get("text", sent)), result["ttft_s"] if ttft_s is None else ttft_s, result)
    error = event.data.get("error") or {}
    code, message = error.get("code", "answer_failed"), error.get("message", f"the answer was {event.data['state']}")
    if code == "context_length_exceeded":
        raise InvalidRequest(message, code=code, param="messages")
    if code == "document_deleted":
        raise NotFound(message, code=code, param="messages")
    if code == "storage_full":
        raise StorageExhausted(message)
    raise InternalError(message, code=code)


def prefill_figures(services: Services, question: Question) -> dict[str, Any]:
    """Density and recall of the first document's KV."""
    if not question.files:
        return {"density": None, "recall": None}
    try:
        prefill = services.documents.prefill(f"{question.files[0].document.id}:{question.fidelity}")
    except UnknownRecord:
        return {"density": None, "recall": None}
    return {"density": prefill.density, "recall": prefill.recall}
