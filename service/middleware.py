"""What every request passes: a request id, who is calling and how often, and an answer to errors nobody foresaw."""

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.auth import KeyRing, Principal, RateLimiter
from service.errors import ApiError, InternalError, translate
from service.logs import log_fields
from service.metrics import Metrics
from service.sse import ClientGone

log = logging.getLogger(__name__)

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestScope:
    """Takes or makes `x-request-id`, puts it on the response and on log lines, counts, and turns a crash into a 500."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        started_at, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with log_fields(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except (ClientGone, ClientDisconnect):
                pass
            except Exception as error:
                if status:
                    log.exception("request failed after its response had begun")
                    raise
                translated = translate(error)
                if translated is None:
                    log.exception("request failed")
                    translated = InternalError(f"The server failed on this request; its log has {request_id}.")
                await translated.response()(scope, receive, send_with_id)
            finally:
                self._end(scope, status, time.perf_counter() - started_at)

    def _end(self, scope: Scope, status: int, seconds: float) -> None:
        """Counted by route, not by path: ids would make a label of each file."""
        route = getattr(scope.get("route"), "path", "none")
        level = logging.INFO if scope["path"].startswith("/v1/") else logging.DEBUG
        log.log(level, "%s %s: %s after %.3f s", scope["method"], scope["path"], status or "client gone", seconds)
        # A client may call its method anything, and each new name would be a series for good.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.http_requests.labels(method, route, str(status or "gone")).inc()
        self._metrics.http_seconds.labels(method, route).observe(seconds)


class Authentication:
    """Finds the caller's tenant for everything under /v1, and holds their limits for as long as the response runs."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, limiter: RateLimiter) -> None:
        self._app = app
        self._keys = keys
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        try:
            principal = self._keys.authenticate(Headers(scope=scope).get("authorization"))
            limit_headers = self._limiter.enter(principal)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(limit_headers)
            await send(message)

        scope.setdefault("state", {})["principal"] = principal
        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            self._limiter.leave(principal)


def principal_of(scope: Scope) -> Principal:
    principal: Principal = scope["state"]["principal"]
    return principal
