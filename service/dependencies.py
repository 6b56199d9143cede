"""What routes are handed: the server's objects, and what one request says about itself."""

import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from anyio import CapacityLimiter
from fastapi import Depends
from starlette.requests import Request

from engine.kv_store import VerifyReport
from service.auth import Principal
from service.background import Background
from service.documents.base import Documents
from service.errors import InvalidRequest, TooLarge, UnsupportedMediaType
from service.kv_policy import KeepsPolicies
from service.limits.gate import Gate
from service.metrics import Metrics
from service.middleware import principal_of
from service.objects.base import Objects
from service.queue.base import Queue
from service.served_model import ServedModel
from service.settings import Settings
from service.traces import Traces
from service.uploads import UploadStore
from service.webhook_sender import Sender

STATUS_THREADS = 4
MAX_JSON_BYTES = 4 << 20  # most of it may be kept (service.objects)
MAX_WITH_FILES_BYTES = 64 << 20  # a file given inline is a third larger in base64
_WITH_FILES = ("/v1/chat/completions", "/v1/responses")
_SURROGATE = re.compile(r"\\u[dD]")


class KVDescriptions(KeepsPolicies, Protocol):
    """What the API process needs of the KV store: nothing that reads KV to compute with it."""

    def describe(self, holders: Sequence[str]) -> Mapping[str, Mapping[str, int]]:
        """Bytes of what each of them holds, by tier."""
        ...

    def usage(self) -> Mapping[str, int]: ...

    def verify(self, holder: str | None = None) -> VerifyReport: ...


@dataclass(frozen=True)
class Services:
    """Everything one API process works with, opened and closed by whoever made the app."""

    settings: Settings
    queue: Queue
    documents: Documents
    objects: Objects
    gate: Gate
    kv_store: KVDescriptions
    model: ServedModel
    uploads: UploadStore
    metrics: Metrics
    worker_seen: Callable[[], bool]
    engine_digest: Callable[[str], str | None]  # of a fidelity; None while no worker has told it
    worker_names: Callable[[], Sequence[str]]
    background: Background
    sender: Sender
    traces: Traces = field(default_factory=Traces)
    status_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(STATUS_THREADS))
    reader: str = field(default_factory=lambda: f"api-{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}")
    answer_readers: Counter[str] = field(default_factory=Counter)  # job id → responses of this process that follow it


def get_services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def get_tenant(request: Request) -> str:
    return principal_of(request.scope).tenant


def get_principal(request: Request) -> Principal:
    return principal_of(request.scope)


async def get_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object; {} where there is none. Raises UnsupportedMediaType, TooLarge, InvalidRequest."""
    body = bytearray()
    most_bytes = MAX_WITH_FILES_BYTES if request.url.path in _WITH_FILES else MAX_JSON_BYTES
    async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
            raise TooLarge(
                f"a JSON body may have {most_bytes} bytes here: upload larger files with /v1/files",
                code="request_too_large",
            )
    if not body:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaType(f"application/json is expected, got {kind or 'no content type'!r}")
    try:
        data = load_json(body.decode())
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise InvalidRequest(f"a JSON object is expected, got {type(data).__name__}", code="invalid_json")
    return data


def load_json(text: str) -> Any:
    """Raises ValueError for what is no JSON, nests too deep, or spells half of a surrogate pair, which is no text."""
    try:
        data = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
    return data


ServicesDep = Annotated[Services, Depends(get_services)]
TenantDep = Annotated[str, Depends(get_tenant)]
PrincipalDep = Annotated[Principal, Depends(get_principal)]
JsonDep = Annotated[dict[str, Any], Depends(get_json)]
