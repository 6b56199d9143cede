"""Every error that HTTP can answer with, in the OpenAI shape. No other module names a status code of an error.

ApiError                     status, code
├── InvalidRequest           400  the request can never succeed as it is: invalid_value, missing_parameter, …
│   ├── UnsupportedOption    400  unsupported_parameter
│   ├── EmptyInput           400  empty_input
│   └── ContextLengthExceeded 400 context_length_exceeded
├── Unauthorized             401  invalid_api_key
├── Forbidden                403  forbidden_host, forbidden_origin
├── NotFound                 404  file_not_found, document_not_found, model_not_found, not_found
├── MethodNotAllowed         405  method_not_allowed
├── NotReady                 409  document_not_ready
├── Conflict                 409  request_in_progress
├── TooLarge                 413  file_too_large, request_too_large
├── UnsupportedMediaType     415  unsupported_media_type
├── DocumentFailed           422  the document's own code: encrypted_pdf, unsafe_archive, …
├── KeyReused                422  idempotency_key_reused
├── RateLimited              429  rate_limit_exceeded
├── QuotaExceeded            429  insufficient_quota
├── InternalError            500  internal_error, answer_failed
├── Unavailable              503  unavailable
└── StorageExhausted         507  storage_full
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from engine.errors import EngineError, StorageFull
from service.documents.base import UnknownRecord
from service.queue.base import QueueError

log = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer to the caller: what was got, what was expected, and whether trying again can help."""

    status = 500
    type = "invalid_request_error"
    code = "internal_error"
    retry = False

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code
        self.param = param
        self.headers = dict(headers or {})
        if self.status >= 408 and not self.retry:
            self.headers.setdefault("x-should-retry", "false")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


class InvalidRequest(ApiError):
    status = 400
    code = "invalid_value"


class UnsupportedOption(InvalidRequest):
    code = "unsupported_parameter"


class EmptyInput(InvalidRequest):
    code = "empty_input"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"

    def __init__(self, *, limit: int, prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the messages, {max_tokens} in the completion).",
            param="messages",
        )


class Unauthorized(ApiError):
    status = 401
    code = "invalid_api_key"


class Forbidden(ApiError):
    status = 403
    code = "forbidden_origin"


class NotFound(ApiError):
    status = 404
    code = "not_found"


class MethodNotAllowed(ApiError):
    status = 405
    code = "method_not_allowed"


class NotReady(ApiError):
    status = 409
    code = "document_not_ready"


class Conflict(ApiError):
    status = 409
    code = "request_in_progress"
    retry = True


class TooLarge(ApiError):
    status = 413
    code = "file_too_large"


class UnsupportedMediaType(ApiError):
    status = 415
    code = "unsupported_media_type"


class DocumentFailed(ApiError):
    status = 422
    code = "document_failed"


class RateLimited(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry = True

    def __init__(self, message: str, *, retry_after_s: float, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, headers={"retry-after": str(max(1, math.ceil(retry_after_s))), **(headers or {})})


class KeyReused(ApiError):
    status = 422
    code = "idempotency_key_reused"


class QuotaExceeded(ApiError):
    """Waiting doesn't help: something must be deleted first."""

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"


class InternalError(ApiError):
    status = 500
    type = "server_error"


class Unavailable(ApiError):
    status = 503
    type = "server_error"
    code = "unavailable"
    retry = True

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"retry-after": "2"})


class StorageExhausted(ApiError):
    status = 507
    type = "server_error"
    code = "storage_full"


def from_validation(error: ValidationError | RequestValidationError) -> InvalidRequest:
    """The first thing that is wrong with a body or query, its place as `param`."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    param = ".".join(place) or None
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return InvalidRequest(f"{param or 'request body'}: {first['msg']}", param=param, code=code)


def translate(error: Exception) -> ApiError | None:
    """The HTTP meaning of an error of another layer; None for one that nobody foresaw."""
    match error:
        case ApiError():
            return error
        case RequestValidationError() | ValidationError():
            return from_validation(error)
        case UnknownRecord():
            return NotFound(str(error) or "no such file or document", code="file_not_found")
        case StorageFull() | OSError(errno=28):
            return StorageExhausted(f"no room left: {error}")
        case QueueError():
            return Unavailable(f"the queue can't be reached: {error}")
        case EngineError():
            return InternalError(str(error), code=error.code)
        case HTTPException():
            return _from_framework(error)
    return None


def _from_framework(error: HTTPException) -> ApiError:
    """Errors that the framework raises itself: unknown path, wrong method, unreadable body."""
    message = str(error.detail)
    kinds: dict[int, type[ApiError]] = {404: NotFound, 405: MethodNotAllowed, 413: TooLarge, 415: UnsupportedMediaType}
    kind = kinds.get(error.status_code, InvalidRequest if error.status_code < 500 else InternalError)
    return kind(message, headers=error.headers)


def install(app: FastAPI) -> None:
    """Answer every foreseen error in the OpenAI shape; the others are `service.middleware`'s."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        translated = translate(error)
        if translated is None:
            raise error
        if isinstance(translated, NotFound | MethodNotAllowed) and isinstance(error, HTTPException):
            translated.message = f"{translated.message}: {request.method} {request.url.path}"
        if translated.status >= 500:
            log.warning("%s: %s", translated.code, type(error).__name__, exc_info=error)
        return translated.response()

    for kind in (ApiError, RequestValidationError, UnknownRecord, EngineError, QueueError, HTTPException, OSError):
        app.add_exception_handler(kind, handle)
