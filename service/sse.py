"""Server-sent events: how they are written, and a response that lets go of its work as soon as nobody reads."""

import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

from service.errors import InternalError, translate

HEARTBEAT_S = 2.0
KEEPALIVE_S = 15.0  # of streams that show nothing but events
DONE = "data: [DONE]\n\n"
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


def event(data: Any, *, name: str | None = None, event_id: str | None = None) -> str:
    """One event; `data` as JSON on one line."""
    lines = [f"id: {event_id}"] if event_id else []
    lines += [f"event: {name}"] if name else []
    return "\n".join([*lines, f"data: {json.dumps(data, ensure_ascii=False)}", "", ""])


def comment(text: str) -> str:
    """A line that clients skip: it keeps the connection alive and people informed."""
    return f": {text}\n\n"


class EventStream(StreamingResponse):
    """Streams a generator of events, and closes it at once when the client goes.

    An error that ends the generator becomes a last event `{"error": …}`, which the official client raises.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        self._events = events
        super().__init__(_with_errors(events), headers={"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await super().stream_response(send)


async def _with_errors(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    try:
        async for piece in events:
            yield piece
    except Exception as error:
        translated = translate(error)
        yield event((translated or InternalError("The server failed on this request.")).body())
        if translated is None:
            raise


async def until_disconnect(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which is cancelled when the client goes. Raises ClientGone, and what `work` raises."""
    results: list[T] = []
    errors: list[Exception] = []
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        async def run() -> None:
            try:
                results.append(await work())
            except Exception as error:  # kept out of the group, which would wrap it
                errors.append(error)
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        tasks.start_soon(run)
    if errors:
        raise errors[0]
    if not results:
        raise ClientGone
    return results[0]
