"""What travels inside a job: the payload the API puts, the events and the result the worker gives back.

Plain JSON, so that every queue backend stores it as it is. Token ids of documents never travel: the worker reads them
from the document's folder and builds the prefix with `service.prompt`, which both sides share.
"""

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

ANSWER_PRIORITY = 10


class Origin(TypedDict):
    """The request that a job began with: in every log line and span of the job."""

    request_id: NotRequired[str]
    traceparent: NotRequired[str]  # W3C trace context, while traces are on


def origin_of(carrier: Mapping[str, Any]) -> Origin:
    """The origin in a payload, or in the state of an API request."""
    origin: Origin = {}
    if (request_id := carrier.get("request_id")) is not None:
        origin["request_id"] = request_id
    if (traceparent := carrier.get("traceparent")) is not None:
        origin["traceparent"] = traceparent
    return origin


class IngestPayload(Origin):
    """Turn a file's uploaded bytes into a document; its record says where the bytes are."""

    file_id: str
    upload_seconds: NotRequired[float]  # how long the bytes took to come


class PrefillPayload(Origin):
    """Make the KV of one document's prefix (`PromptFormat.document_prefix` of its tokens)."""

    document_id: str
    fidelity: str
    uploaded_at: float  # unix seconds: a cold TTFT counts from here
    ingest_seconds: NotRequired[float]  # of the time since then


class AnswerPayload(Origin):
    """Answer `question` after the prefix of `documents`, in that order.

    Where the prefix's KV is not stored (evicted, or several documents) the worker prefills it first, as part of this
    job, and reports its progress.
    """

    documents: list[str]  # document ids; empty: no prefix
    question: list[int]  # token ids, at least one
    fidelity: str
    sampling: dict[str, Any]  # the fields of engine.interfaces.SamplingParams
    received_at: float  # unix seconds: a warm TTFT counts from here
    waited: bool  # the request waited for a prefill: its TTFT is cold or partial, and was observed there


class TokenEvent(TypedDict):
    """Data of an event of type `token`: text whose stop strings and half characters are already settled."""

    text: str


class ProgressEvent(TypedDict):
    """Data of an event of type `progress`."""

    progress: float  # 0–1
    stage: str
    eta_s: NotRequired[float | None]


class AnswerResult(TypedDict):
    """`result` of a finished answer job."""

    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int  # prefix and question
    completion_tokens: int
    cached_tokens: int  # of the prompt, taken from stored KV
    cache_state: str  # engine.interfaces.CacheState
    ttft_s: float
    density: NotRequired[float | None]
    recall: NotRequired[dict[str, Any] | None]
