"""What a response is while it lives: an object (service.objects) that says what was asked, and one answer job.

`waiting`, while its documents are read; `asked`, once its job is put: from then on the job says how far it is; `failed`
or `cancelled`, where it came to no job or was ended. Nothing of an answer is kept here: what its job forgets is gone.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.answers import Question, make_question
from service.auth import Limits, Principal
from service.background import Held
from service.conversation import read_conversation
from service.dependencies import Services
from service.documents.base import UnknownRecord
from service.errors import ApiError, InvalidRequest, NotFound
from service.objects.base import StoredObject, UnknownObject
from service.queue.base import SCRUBBED, Job, UnknownJob
from service.response_schemas import ResponseRequest
from service.schemas import ChatMessage, ChatRequest
from service.waiting import ReadyFile, Unready, look

KEPT_S = 24 * 3600.0  # as long as the queue keeps its job
INTERRUPTED_S = 60.0
MAX_TURNS = 100


@dataclass(frozen=True)
class Standing:
    """How far a response is. `job` once it is put, `error` where it failed."""

    status: str  # queued | in_progress | completed | incomplete | failed | cancelled
    job: Job | None = None
    error: Mapping[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.status not in ("queued", "in_progress")


def asker_of(stored: StoredObject) -> Principal:
    """Whose slot a background response holds."""
    key: Mapping[str, Any] = stored.data["key"]
    return Principal(stored.tenant, Limits(concurrent_answers=key["answers"]), key["id"])


def find_response(services: Services, tenant: str, response_id: str) -> StoredObject:
    """Raises NotFound, also for what was not to be stored."""
    try:
        stored = services.objects.get("response", tenant, response_id)
    except UnknownObject:
        stored = None
    if stored is None or not stored.data["request"]["store"]:
        raise NotFound(f"Response with id '{response_id}' not found.", param="response_id", code="response_not_found")
    return stored


def standing(services: Services, stored: StoredObject) -> Standing:
    """Raises NotFound where the answer went with its document."""
    data, waiting = stored.data, "queued" if stored.data["request"]["background"] else "in_progress"
    if data["status"] == "waiting":
        return Standing(waiting)
    if data["status"] in ("failed", "cancelled"):
        return Standing(data["status"], error=data["error"])
    try:
        job = services.queue.get(data["job_id"])
    except UnknownJob:
        if time.time() - data["asked_at"] < INTERRUPTED_S or data["request"]["background"]:
            return Standing(waiting)
        return Standing("failed", error=INTERRUPTED)
    if SCRUBBED in (job.payload, job.result):
        raise NotFound("its document was deleted, and the answer with it", param="response_id", code="document_deleted")
    match job.state:
        case "queued":
            return Standing(waiting, job)
        case "running":
            return Standing("in_progress", job)
        case "succeeded":
            cut = (job.result or {}).get("finish_reason") == "length"
            return Standing("incomplete" if cut else "completed", job)
        case "cancelled":
            return Standing("cancelled", job)
    return Standing("failed", job, job.error)


INTERRUPTED = {"code": "server_error", "message": "the server ended before it could ask; send the request again"}


def read_request(stored: StoredObject) -> ResponseRequest:
    return ResponseRequest.model_validate(stored.data["request"])


def read_chat(services: Services, stored: StoredObject) -> ChatRequest:
    """The whole conversation as one chat request. Raises InvalidRequest where an earlier turn is gone."""
    request = read_request(stored)
    return request.as_chat(earlier_turns(services, stored.tenant, request.previous_response_id))


def earlier_turns(services: Services, tenant: str, response_id: str | None) -> list[ChatMessage]:
    """What was said before, oldest first, instructions left out. Raises InvalidRequest."""
    turns: list[list[ChatMessage]] = []
    while response_id is not None:
        if len(turns) >= MAX_TURNS:
            raise _bad_previous(f"the conversation has more than {MAX_TURNS} turns")
        try:
            stored = find_response(services, tenant, response_id)
            now = standing(services, stored)
        except NotFound as error:
            raise _bad_previous(f"Previous response with id '{response_id}' not found: {error.message}") from error
        if now.job is None or now.status not in ("completed", "incomplete"):
            raise _bad_previous(f"{response_id} is {now.status}: a completed response is expected")
        said = ChatMessage(role="assistant", content=str((now.job.result or {})["text"]))
        request = read_request(stored)
        turns.append([*(message.as_chat() for message in request.input), said])
        response_id = request.previous_response_id
    return [message for turn in reversed(turns) for message in turn]


def _bad_previous(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="previous_response_id", code="previous_response_not_found")


def question_of(services: Services, chat: ChatRequest, files: Sequence[ReadyFile]) -> Question:
    """Raises ContextLengthExceeded, InvalidRequest."""
    return make_question(services, read_conversation(chat.messages).messages, files, chat)


def ready_files(services: Services, stored: StoredObject) -> Sequence[ReadyFile]:
    """For citations: none where one of them is gone."""
    try:
        found = look(services, stored.tenant, stored.data["files"])
    except (ApiError, UnknownRecord):
        return []
    return [] if isinstance(found, Unready) else found


async def fail(held: Held, error: ApiError) -> None:
    reason = {"code": error.code, "message": error.message}
    await held.save({"status": "failed", "error": reason}, due_at=time.time())
