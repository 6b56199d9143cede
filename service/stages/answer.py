"""A claimed job of kind `answer`: prefix from stored KV (made first where it isn't stored), then token after token."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from blake3 import blake3

from engine.errors import KVMissing
from engine.interfaces import (
    Answer,
    AnswerRequest,
    Fidelity,
    PrefillRequest,
    PrefillResult,
    SamplingParams,
)
from service.documents.base import PrefillRecord, UnknownRecord
from service.kv_policy import kv_policy
from service.payloads import AnswerPayload, AnswerResult
from service.queue.base import NO_EFFECTS, Effects, Job, RecordChange
from service.stages.context import StageContext
from service.stages.prefill import prefill_fields, prefill_id, report_progress, trace_prefill

log = logging.getLogger(__name__)

EMIT_S = 0.02  # tokens of so long go out together
MAX_PREFILLS = 3  # KV that vanishes again and again is not made for ever


class AnswerJob:
    """`answering` while it has KV to answer from; else it waits for a prefill run that it joined."""

    def __init__(self, context: StageContext, job: Job) -> None:
        self.job = job
        self._context = context
        self._payload: AnswerPayload = job.payload  # type: ignore[assignment]
        self._answer: Answer | None = None
        self._prefills: list[tuple[PrefillRequest, PrefillResult]] = []
        self._started_at = context.clock()
        self._first_token_at: float | None = None
        self._prefill_s = self._prefill_kv_s = 0.0  # of the wait for KV that had to be made
        self._answering_at = self._started_at  # since when there is KV to answer from
        self._kv_waited_s = 0.0  # of the first step: the KV store's share
        self._text = ""
        self._emitted = 0  # characters that readers have
        self._emitted_at = 0.0
        self._reported_at = 0.0
        self._finish_reason: str | None = None
        self._completion_tokens = 0

    @property
    def answering(self) -> bool:
        return self._answer is not None

    @property
    def has_begun(self) -> bool:
        """It has its first token: the question's rows are computed, each further step is short."""
        return self._answer is not None and self._answer.completion_tokens > 0

    def start(self) -> PrefillRequest | None:
        """Begin to answer; returns the prefill that must come first where KV is missing.

        Raises ContextTooLong, UnknownRecord, KVMissing (it vanished MAX_PREFILLS times).
        """
        request = self._request()
        try:
            self._answer = self._context.engine.start_answer(request)
        except KVMissing:
            return self._prefill_request(request)
        return None

    def step(self) -> PrefillRequest | None:
        """One token. Returns as `start` does where KV was damaged. Raises LeaseLost and what the engine raises."""
        assert self._answer is not None
        kv_waited_s = self._context.metrics.kv_waited_s
        try:
            delta = self._answer.step()
        except KVMissing as error:
            log.warning("stored KV of job %s failed while answering: %s; it is computed again", self.job.id, error)
            self._context.metrics.kv_decisions.labels("recomputed_damaged").inc()
            self.close()
            # The same seed gives the same words: what was emitted is not repeated.
            self._text, self._completion_tokens = "", 0
            return self._prefill_request(self._request())
        self._text += delta.text
        if self._first_token_at is None:
            self._kv_waited_s = self._context.metrics.kv_waited_s - kv_waited_s
            self._observe_first_token(self._answer)
        self._finish_reason = delta.finish_reason
        self._completion_tokens = self._answer.completion_tokens
        if self.ended or self._context.clock() - self._emitted_at >= EMIT_S:
            self.flush()
        return None

    @property
    def ended(self) -> bool:
        return self._finish_reason is not None

    def prefill_progress(self, fraction: float, eta_s: float | None) -> None:
        self._reported_at = report_progress(self._context, self.job, self._reported_at, fraction, eta_s)

    def prefilled(self, request: PrefillRequest, result: PrefillResult, kv_waited_s: float) -> None:
        """The run that this job joined made the KV; `kv_waited_s` of its time it waited for the KV store."""
        self._prefills.append((request, result))
        began_at, self._answering_at = self._answering_at, self._context.clock()
        self._prefill_s += max(0.0, self._answering_at - began_at)
        self._prefill_kv_s += kv_waited_s
        named = {"foreword.fidelity": request.fidelity}
        trace_prefill(self._context, self.job, began_at, self._answering_at, result, kv_waited_s, named)

    def failed(self, code: str) -> None:
        self._trace(self._context.clock(), {}, error=code)

    def finish(self) -> None:
        """Raises LeaseLost."""
        assert self._answer is not None
        context, answer = self._context, self._answer
        cached = self._cached_tokens(answer)
        result: AnswerResult = {
            "text": self._text,
            "finish_reason": self._finish_reason,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "cached_tokens": cached,
            "cache_state": self._cache_state(answer),
            "ttft_s": self._ttft_s(),
            **self._figures(),  # type: ignore[typeddict-item]
        }
        context.queue.finish(self.job, result, self._effects())
        metrics = context.metrics
        metrics.generated_tokens.inc(self._completion_tokens)
        if not self._prefills:
            metrics.prompt_tokens.labels("cached").inc(cached)
        metrics.prompt_tokens.labels("computed").inc(len(self._payload["question"]) + answer.computed_tokens)
        tenant = metrics.tenant(self.job.tenant)
        metrics.tenant_tokens.labels(tenant, "prompt").inc(len(self._payload["question"]))
        metrics.tenant_tokens.labels(tenant, "generated").inc(self._completion_tokens)
        ended_at = context.clock()
        metrics.stage_seconds.labels("answer").observe(max(0.0, ended_at - self._started_at))
        metrics.answer_seconds.labels(context.model_id).observe(max(0.0, ended_at - self._payload["received_at"]))
        self._trace(ended_at, result)
        self.close()

    def close(self) -> None:
        """Let go of the KV; safe at any time."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _request(self) -> AnswerRequest:
        payload = self._payload
        return AnswerRequest(
            prefix=self._context.prefix(self.job.tenant, self._payload["documents"]),
            question=np.asarray(payload["question"], dtype=np.uint32),
            salt=self._context.salt(self.job.tenant),
            sampling=self._sampling(),
            fidelity=self._fidelity,
        )

    @property
    def _fidelity(self) -> Fidelity:
        return self._payload["fidelity"]  # type: ignore[return-value]

    def _sampling(self) -> SamplingParams:
        values: dict[str, Any] = dict(self._payload["sampling"])
        values["stop"] = tuple(values.get("stop") or ())
        if values.get("seed") is None:
            # Another attempt at this job must say the same.
            values["seed"] = int.from_bytes(blake3(self.job.id.encode()).digest()[:4], "little")
        return SamplingParams(**values)

    def _prefill_request(self, request: AnswerRequest) -> PrefillRequest:
        if len(self._prefills) >= MAX_PREFILLS:
            raise KVMissing(f"the KV of this prompt vanished {MAX_PREFILLS} times before it could be used")
        self._context.metrics.kv_decisions.labels("computed").inc()
        documents = self._payload["documents"]
        if len(documents) == 1:
            holder = prefill_id(documents[0], self._fidelity)
            policy = kv_policy(self._context.documents, documents[0], self._fidelity)
            ttl_s, pinned = policy.ttl_s, policy.pinned
            if self._record() is None:  # no handle has this fidelity: the KV is the document's all the same
                self._context.documents.share_holder(holder, documents)
        else:
            holder, ttl_s, pinned = shared_holder(documents, self._fidelity), None, False
            self._context.documents.share_holder(holder, documents)
        return PrefillRequest(
            tokens=request.prefix,
            salt=request.salt,
            owner=self.job.id,
            holder=holder,
            fidelity=self._fidelity,
            kv_ttl_s=ttl_s,
            pinned=pinned,
        )

    def _trace(self, ended_at: float, result: Mapping[str, Any], *, error: str | None = None) -> None:
        traces, traceparent = self._context.traces, self._payload.get("traceparent")
        if not traces.on:
            return
        sampling: Mapping[str, Any] = self._payload.get("sampling", {})
        reason = result.get("finish_reason")
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.response.model": self._context.model_id,
            "gen_ai.request.max_tokens": sampling.get("max_tokens"),
            "gen_ai.request.temperature": sampling.get("temperature"),
            "gen_ai.request.top_p": sampling.get("top_p"),
            "gen_ai.response.finish_reasons": None if reason is None else [reason],
            "gen_ai.response.time_to_first_chunk": result.get("ttft_s"),
            "gen_ai.usage.input_tokens": result.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": result.get("completion_tokens"),
            "gen_ai.usage.cache_read.input_tokens": result.get("cached_tokens"),
            "foreword.cache_state": result.get("cache_state"),
            "foreword.job.id": self.job.id,
        }
        if self._first_token_at is not None and self._payload.get("documents"):
            read_at = max(self._answering_at, self._first_token_at - self._kv_waited_s)
            traces.stage(
                "kv_store",
                traceparent,
                read_at,
                read_at + self._kv_waited_s,
                {"foreword.kv.operation": "read", "foreword.cache_state": result.get("cache_state")},
            )
        traces.stage("answer", traceparent, self._answering_at, ended_at, attributes, error=error)

    def _observe_first_token(self, answer: Answer) -> None:
        context = self._context
        self._first_token_at = context.clock()
        if not self._prefills and self._payload["documents"]:
            context.metrics.kv_decisions.labels(self._decision(answer)).inc()
        if not self._payload["waited"]:  # who waited for an upload's prefill was observed there
            ttft_s = self._ttft_s()
            prefill_s = self._prefill_s - self._prefill_kv_s
            kv_s = self._prefill_kv_s + self._kv_waited_s
            queue_s = max(0.0, self._started_at - self._payload["received_at"])
            stages = {"queue": queue_s, "kv_store": kv_s, "answer": ttft_s - queue_s - prefill_s - kv_s}
            if self._prefills:
                stages["prefill"] = prefill_s
            context.metrics.first_token(context.model_id, self._cache_state(answer), ttft_s, stages)

    def _decision(self, answer: Answer) -> str:
        """How stored KV was come by."""
        if not answer.computed_tokens:
            return "reused"
        prefix_tokens = answer.prompt_tokens - len(self._payload["question"])
        return "loaded_and_computed" if answer.computed_tokens < prefix_tokens else "computed_instead"

    def _ttft_s(self) -> float:
        assert self._first_token_at is not None
        return max(0.0, self._first_token_at - self._payload["received_at"])

    def _cache_state(self, answer: Answer) -> str:
        if self._prefills:
            return "partial" if self._prefills[0][1].cached_tokens else "cold"
        if self._payload["waited"] and (record := self._record()) is not None:
            return "partial" if record.cached_tokens else "cold"
        if answer.computed_tokens:
            return "partial" if self._cached_tokens(answer) else "cold"
        return answer.kv_tier if self._payload["documents"] else "cold"

    def _cached_tokens(self, answer: Answer) -> int:
        if self._prefills:
            return self._prefills[0][1].cached_tokens
        if self._payload["waited"] and (record := self._record()) is not None:
            return record.cached_tokens or 0  # what its upload's prefill was spared
        return answer.prompt_tokens - len(self._payload["question"]) - answer.computed_tokens

    def _record(self) -> PrefillRecord | None:
        documents = self._payload["documents"]
        if not documents:
            return None
        try:
            return self._context.documents.prefill(prefill_id(documents[0], self._fidelity))
        except UnknownRecord:
            return None

    def _figures(self) -> dict[str, Any]:
        """Density and recall of the KV that was answered from, as far as they are known."""
        if self._prefills:
            fields = prefill_fields(self._context, *self._prefills[-1])
            return {"density": fields["density"], "recall": fields["recall"]}
        if len(self._payload["documents"]) == 1 and (record := self._record()) is not None:
            return {"density": record.density, "recall": record.recall}
        return {}

    def _effects(self) -> Effects:
        """KV of one document that was made here is that document's."""
        if not self._prefills or len(self._payload["documents"]) != 1:
            return NO_EFFECTS
        request, result = self._prefills[-1]
        return Effects([RecordChange("prefills", request.holder, prefill_fields(self._context, request, result))])

    def flush(self) -> None:
        """Hand on what was held back for company; also due before anything that takes long. Raises LeaseLost."""
        fresh = self._text[self._emitted :]
        if fresh:
            self._context.queue.emit(self.job, [("token", {"text": fresh})])
            self._emitted = len(self._text)
        self._emitted_at = self._context.clock()


def shared_holder(document_ids: list[str], fidelity: str) -> str:
    """Names the KV of a prefix over several documents, in this order."""
    digest = blake3("\n".join(document_ids).encode()).hexdigest()[:24]
    return f"prefix-{digest}:{fidelity}"
