"""A response in the OpenAI shape, whole and as events with sequence numbers.

The events follow from the record and its job's log alone: who reads again gets the same numbers, so a stream can be
gone on with anywhere, through any process, for as long as the job is kept.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import anyio
from anyio import to_thread

from service.answers import Finished, Text, follow_answer
from service.citations import citations
from service.dependencies import Services
from service.errors import ApiError
from service.objects.base import StoredObject
from service.queue.base import UnknownJob
from service.response_records import ready_files, standing
from service.sse import comment, event
from service.waiting import Stage

Steps = AsyncGenerator[Stage | Text | Finished, None]
Json = dict[str, Any]
PUT_S = 0.05  # between two looks for a job that is about to be put


def response_view(services: Services, stored: StoredObject) -> Json:
    """As it stands now. Raises NotFound where the answer went with its document."""
    now = standing(services, stored)
    if now.job is None or now.job.state != "succeeded":
        return _view(services, stored, now.status, error=now.error)
    result = now.job.result or {}
    text = str(result["text"])
    item = _message(stored, text, citations(services, text, ready_files(services, stored)), status=now.status)
    return _view(services, stored, now.status, output=[item], result=result, completed_at=now.job.finished_at)


def _view(
    services: Services,
    stored: StoredObject,
    status: str,
    *,
    output: Sequence[Json] = (),
    result: Mapping[str, Any] | None = None,
    error: Mapping[str, Any] | None = None,
    completed_at: float | None = None,
) -> Json:
    request = stored.data["request"]
    return {
        "id": stored.id,
        "object": "response",
        "created_at": int(stored.created_at),
        "completed_at": int(completed_at) if completed_at is not None and status == "completed" else None,
        "status": status,
        "background": request["background"],
        "error": None if error is None else {"code": error["code"], "message": error["message"]},
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.get("instructions"),
        "max_output_tokens": request.get("max_output_tokens"),
        "metadata": request.get("metadata") or {},
        "model": services.model.id,
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": request.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": request["store"],
        "temperature": request.get("temperature", 0.0),
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": request.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": None if result is None else usage(result, stored.data["question_tokens"]),
        "foreword": _extras(result) if result is not None else None,
    }


def usage(result: Mapping[str, Any], question_tokens: int) -> Json:
    prompt, completion, cached = (int(result[name]) for name in ("prompt_tokens", "completion_tokens", "cached_tokens"))
    return {
        "input_tokens": prompt,
        # What of the documents was not stored yet is now.
        "input_tokens_details": {
            "cached_tokens": cached,
            "cache_write_tokens": max(0, prompt - question_tokens - cached),
        },
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def _extras(result: Mapping[str, Any]) -> Json:
    return {name: result.get(name) for name in ("ttft_s", "cache_state", "density", "recall")}


def _message(stored: StoredObject, text: str, annotations: Sequence[Json], *, status: str) -> Json:
    return {
        "id": f"msg{stored.id.removeprefix('resp')}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_part(text, annotations)],
    }


def _part(text: str, annotations: Sequence[Json]) -> Json:
    # The client's type has `index`, where the answer's quotation ends.
    cited = [{**annotation, "index": annotation["end_index"]} for annotation in annotations]
    return {"type": "output_text", "text": text, "annotations": cited, "logprobs": []}


async def response_events(
    services: Services,
    stored: StoredObject,
    *,
    reload: Callable[[], StoredObject],
    waiting: AsyncGenerator[Stage, None],
    starting_after: int = -1,
) -> AsyncGenerator[str, None]:
    """Events behind `starting_after`, to the end. `waiting` ends when the response is asked, or has failed."""
    async with aclosing(_events(services, stored, reload, waiting, starting_after)) as pieces:
        async for piece in pieces:
            if piece:
                yield piece


async def _events(
    services: Services,
    stored: StoredObject,
    reload: Callable[[], StoredObject],
    waiting: AsyncGenerator[Stage, None],
    starting_after: int,
) -> AsyncGenerator[str, None]:
    number = -1

    def numbered(kind: str, **data: Any) -> str:
        nonlocal number
        number += 1
        if number <= starting_after:
            return ""
        return event({"type": kind, "sequence_number": number, **data}, name=kind)

    def lifecycle(kind: str, response: Json) -> str:
        return numbered(f"response.{kind}", response=response)

    background = stored.data["request"]["background"]
    first = "queued" if background else "in_progress"
    yield lifecycle("created", _view(services, stored, first))
    yield lifecycle(first, _view(services, stored, first))
    async with aclosing(waiting) as stages:
        async for stage in stages:
            yield comment(str(stage))
    stored = await to_thread.run_sync(reload)
    if stored.data["asked_at"] is not None:  # also of one that was ended since: its words keep their numbers
        if background:
            yield lifecycle("in_progress", _view(services, stored, "in_progress"))
        async with aclosing(_answer_events(services, stored, reload, numbered)) as pieces:
            async for piece in pieces:
                yield piece
    stored = await to_thread.run_sync(reload)
    now = await to_thread.run_sync(standing, services, stored)
    kind = {"completed": "completed", "failed": "failed"}.get(now.status, "incomplete")
    yield lifecycle(kind, await to_thread.run_sync(response_view, services, stored))


async def _follow(services: Services, stored: StoredObject, reload: Callable[[], StoredObject]) -> Steps:
    """Steps of the answer's job. It may not be there for a moment: the record says `asked` before the job is put."""
    while True:
        now = await to_thread.run_sync(lambda: standing(services, reload()))
        if now.job is not None or now.ended:
            break
        yield Stage("queue")
        await anyio.sleep(PUT_S)
    async with aclosing(follow_answer(services, stored.data["job_id"], stored.data["received_at"])) as steps:
        async for step in steps:
            yield step


async def _answer_events(
    services: Services, stored: StoredObject, reload: Callable[[], StoredObject], numbered: Callable[..., str]
) -> AsyncGenerator[str, None]:
    """Everything between the first and the last word; nothing behind the last where the answer failed or was ended."""
    item = _message(stored, "", [], status="in_progress")
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    begun = False

    def begin() -> str:
        added = numbered("response.output_item.added", output_index=0, item={**item, "content": []})
        return added + numbered("response.content_part.added", **place, part=_part("", []))

    try:
        async with aclosing(_follow(services, stored, reload)) as steps:
            async for step in steps:
                if isinstance(step, Stage):
                    yield comment(str(step))
                    continue
                if not begun:
                    begun = True
                    yield begin()
                if isinstance(step, Text):
                    yield numbered("response.output_text.delta", **place, delta=step.text, logprobs=[])
                    continue
                files = await to_thread.run_sync(ready_files, services, stored)
                annotations = await to_thread.run_sync(citations, services, step.text, files)
                part = _part(step.text, annotations)
                for index, annotation in enumerate(part["annotations"]):
                    yield numbered(
                        "response.output_text.annotation.added",
                        **place,
                        annotation_index=index,
                        annotation=annotation,
                    )
                yield numbered("response.output_text.done", **place, text=step.text, logprobs=[])
                yield numbered("response.content_part.done", **place, part=part)
                status = "incomplete" if step.result["finish_reason"] == "length" else "completed"
                done = _message(stored, step.text, annotations, status=status)
                yield numbered("response.output_item.done", output_index=0, item=done)
    except (ApiError, UnknownJob):
        return  # the last event says what became of it
