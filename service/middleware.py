"""What every request passes: a request id, who is calling and how often, and an answer to errors nobody foresaw."""

import logging
import re
import secrets
import time
from collections.abc import Mapping

import anyio
from anyio import to_thread
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.auth import KeyRing, Principal
from service.errors import ApiError, InternalError, RateLimited, translate
from service.limits.gate import Gate
from service.logs import log_fields
from service.metrics import Metrics
from service.sse import ClientGone
from service.traces import RequestTrace, Traces, trace_id_of

log = logging.getLogger(__name__)

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_NO_TRACES = Traces()
_OUR_ID = re.compile(r"[a-z]{3,12}-[0-9a-f]{8,64}")


class RequestScope:
    """Takes or makes `x-request-id`, puts it on the response and on log lines, counts, and turns a crash into a 500.

    With traces on it is the request's span too, in the trace that the header `traceparent` names.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, traces: Traces) -> None:
        self._app = app
        self._metrics = metrics
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        # Probes and scrapes would fill a trace store with nothing.
        traces = self._traces if scope["path"].startswith("/v1/") else _NO_TRACES
        with traces.request(headers.get("traceparent")) as trace:
            scope.setdefault("state", {}).update(request_id=request_id, traceparent=trace.traceparent)
            await self._run(scope, receive, send, request_id, trace)

    async def _run(self, scope: Scope, receive: Receive, send: Send, request_id: str, trace: RequestTrace) -> None:
        started_at, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with log_fields(request_id=request_id, trace_id=trace_id_of(trace.traceparent)):
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
                self._end(scope, status, time.perf_counter() - started_at, trace)

    def _end(self, scope: Scope, status: int, seconds: float, trace: RequestTrace) -> None:
        """Counted and logged by route, not by path: ids would make a label of each file, and paths may say anything."""
        route = getattr(scope.get("route"), "path", "none")
        # A client may call its method anything, and each new name would be a series for good.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        level = logging.INFO if scope["path"].startswith("/v1/") else logging.DEBUG
        ids = [str(value) for value in scope.get("path_params", {}).values() if _OUR_ID.fullmatch(str(value))]
        extra = {"id": ids[0]} if ids else None
        log.log(level, "%s %s: %s after %.3f s", method, route, status or "client gone", seconds, extra=extra)
        trace.ended(method, route, status)
        self._metrics.http_requests.labels(method, route, str(status or "gone")).inc()
        self._metrics.http_seconds.labels(method, route).observe(seconds)


class Authentication:
    """Finds the caller's tenant for everything under /v1, and holds their limits for as long as the response runs."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, gate: Gate) -> None:
        self._app = app
        self._keys = keys
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        try:
            principal = self._keys.authenticate(Headers(scope=scope).get("authorization"))
            headers: Mapping[str, str] = {}
            slot = ""
            if principal.limits.count_requests:
                headers, slot = await to_thread.run_sync(self._gate.enter, principal)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state.update(principal=principal, limit_headers=dict(headers), answer_slots=[])

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(state["limit_headers"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            slots = [("requests", slot)] if slot else []
            slots += [("answers", answer) for answer in state["answer_slots"]]
            if slots:
                with anyio.CancelScope(shield=True):
                    await to_thread.run_sync(self._free, principal, slots)

    def _free(self, principal: Principal, slots: list[tuple[str, str]]) -> None:
        for what, slot in slots:
            self._gate.free(principal, what, slot)


def principal_of(scope: Scope) -> Principal:
    principal: Principal = scope["state"]["principal"]
    return principal


def admit_answer(gate: Gate, scope: Scope, tokens: int, slot: str | None = None) -> None:
    """Hold a question to its key's limits. Its slot is free again when the response ends; one that is named is renewed
    and freed by whoever named it. Raises RateLimited."""
    principal, state = principal_of(scope), scope["state"]
    held = slot or secrets.token_hex(8)
    gate.hold(principal, "answers", held, renewed=slot is None)
    if slot is None:
        state["answer_slots"].append(held)
    try:
        state["limit_headers"].update(gate.take_tokens(principal, tokens))
    except RateLimited:
        if slot is not None:
            gate.free(principal, "answers", slot)
        raise
