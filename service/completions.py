"""Chat completions in the OpenAI shape, whole or in chunks."""

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from anyio import to_thread

from service.answers import Finished, Question, Text, prefill_figures
from service.citations import citations
from service.dependencies import Services
from service.schemas import StreamOptions
from service.sse import DONE, comment, event
from service.waiting import Stage

Steps = AsyncGenerator[Stage | Text | Finished, None]


@dataclass
class Completion:
    """One response. The question is known once its documents are ready."""

    services: Services
    id: str
    question: Question | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self, result: Mapping[str, Any]) -> dict[str, Any]:
        prompt, completion = int(result["prompt_tokens"]), int(result["completion_tokens"])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": int(result["cached_tokens"])},
        }

    async def extras(self, finished: Finished) -> dict[str, Any]:
        """What we add to the OpenAI shape: how long the first token took, and what it was answered from."""
        assert self.question is not None
        figures = {name: finished.result.get(name) for name in ("density", "recall")}
        if figures["density"] is None:
            figures = await to_thread.run_sync(prefill_figures, self.services, self.question)
        extras = {"ttft_s": round(finished.ttft_s, 6), "cache_state": finished.result["cache_state"], **figures}
        if finished.quotes is not None:
            extras |= {"quotes": finished.quotes.quotes, "quotes_dropped": finished.quotes.dropped}
        return extras

    async def annotations(self, finished: Finished) -> list[dict[str, Any]]:
        assert self.question is not None
        return await to_thread.run_sync(citations, self.services, finished.text, self.question.files)

    async def whole(self, steps: Steps) -> dict[str, Any]:
        """Waits for the end. Raises what the answer raises."""
        async with aclosing(steps):
            async for step in steps:
                if isinstance(step, Finished):
                    return await self.finished(step)
        raise AssertionError("an answer ends with Finished or an error")

    async def finished(self, finished: Finished) -> dict[str, Any]:
        """The response to an answer that has ended."""
        message = {
            "role": "assistant",
            "content": finished.text,
            "refusal": None,
            "annotations": await self.annotations(finished),
        }
        return {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": finished.result["finish_reason"],
                    "logprobs": None,
                }
            ],
            "usage": self.usage(finished.result),
            "foreword": await self.extras(finished),
        }

    async def chunks(self, steps: Steps, options: StreamOptions | None) -> AsyncGenerator[str, None]:
        """The same as events: comments while waiting, then chunks, usage last if asked for."""
        with_usage = options is not None and options.include_usage
        begun = False
        async with aclosing(steps):
            async for step in steps:
                if isinstance(step, Stage):
                    yield comment(str(step))
                    continue
                if not begun:
                    begun = True
                    yield event(self._chunk({"role": "assistant", "content": ""}, with_usage=with_usage))
                if isinstance(step, Text):
                    yield event(self._chunk({"content": step.text}, with_usage=with_usage))
                    continue
                annotations = await self.annotations(step)
                last = self._chunk(
                    {"annotations": annotations} if annotations else {},
                    finish_reason=step.result["finish_reason"],
                    with_usage=with_usage,
                )
                extras = await self.extras(step)
                yield event({**last, "foreword": extras})
                if with_usage:
                    head = self._head("chat.completion.chunk")
                    yield event({**head, "choices": [], "usage": self.usage(step.result), "foreword": extras})
        yield DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.services.model.id}

    def _chunk(self, delta: Mapping[str, Any], *, finish_reason: str | None = None, with_usage: bool) -> dict[str, Any]:
        choice = {"index": 0, "delta": dict(delta), "finish_reason": finish_reason, "logprobs": None}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if with_usage else chunk
