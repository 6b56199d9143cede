"""Idempotency-Key on every POST under /v1: what is sent again with the same key and body is done once.

A key belongs to its tenant for 24 hours. What a finished request answered is kept and given again; an answer of the
model is not kept a second time: its job is found again by the key, and says what it said. While the first request runs,
another with its key gets 409, which clients try again, or follows the same answer. A key whose request failed is free.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
from anyio import to_thread
from blake3 import blake3
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ApiError, Conflict, InvalidRequest, KeyReused, TooLarge, UnsupportedMediaType
from service.middleware import principal_of
from service.multipart import boundary_of
from service.objects.base import Json, ObjectChanged, ObjectExists, Objects, StoredObject, UnknownObject
from service.queue.base import QueueUnavailable

KEPT_S = 24 * 3600.0
LEASE_S = 30.0  # a request silent for so long died with its process
MAX_KEPT_BYTES = 1 << 20
MAX_BODY_BYTES = 64 << 20
_ANSWERS = ("/v1/chat/completions", "/v1/responses")


class Idempotency:
    """Stands behind authentication, since keys are tenants' own."""

    def __init__(self, app: ASGIApp, *, objects: Objects) -> None:
        self._app = app
        self._objects = objects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get("idempotency-key") if scope["type"] == "http" else None
        if key is None or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        try:
            await self._once(key, scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    async def _once(self, key: str, scope: Scope, receive: Receive, send: Send) -> None:
        if not 1 <= len(key) <= 255:
            raise InvalidRequest("Idempotency-Key: 1 to 255 characters are expected", param="Idempotency-Key")
        body = await _Body.read(scope, receive)
        claim = _Claim(self._objects, principal_of(scope).tenant, blake3(key.encode()).hexdigest(), scope["path"])
        kept = await to_thread.run_sync(claim.take, None if body.streams else body.fingerprint())
        if kept is not None:
            if kept["state"] == "open" and not _is_answer(scope["path"]):
                raise Conflict("another request with this Idempotency-Key is under way")
            await body.drain()
            if kept["fingerprint"] not in (None, body.fingerprint()):
                raise KeyReused(
                    "this Idempotency-Key came with another request before: use a new key for a new request"
                )
            if kept["state"] == "done":
                await _replay(kept)(scope, receive, send)
                return
        await self._run(claim, body, scope, send)

    async def _run(self, claim: "_Claim", body: "_Body", scope: Scope, send: Send) -> None:
        async def end(kept: Json | None) -> None:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(claim.end, kept, body.fingerprint() if body.complete else None)

        answer = _Recorder(send, end, keep=not _is_answer(scope["path"]))
        async with claim.renewed():
            try:
                await self._app(scope, body.receive, answer.send)
            finally:
                if not answer.ended:
                    await end(None)


def _is_answer(path: str) -> bool:
    return path in _ANSWERS or (path.startswith("/v1/documents/") and path.endswith("/summary"))


class _Body:
    """A request's body and its fingerprint. Multipart bodies stream; others are read first.

    The boundary of a multipart body is left out of its fingerprint: clients make a new one each time.
    """

    def __init__(self, scope: Scope, receive: Receive, boundary: bytes | None) -> None:
        self._receive = receive
        self._boundary = boundary
        self._hash = blake3(scope["path"].encode() + b"\n" + scope.get("query_string", b"") + b"\n")
        self._rest = b""
        self._buffered: list[Message] = []
        self.streams = boundary is not None
        self.complete = False

    @classmethod
    async def read(cls, scope: Scope, receive: Receive) -> "_Body":
        """Raises TooLarge."""
        boundary = None
        with contextlib.suppress(UnsupportedMediaType):
            boundary = boundary_of(Headers(scope=scope).get("content-type", ""))
        body = cls(scope, receive, boundary)
        if not body.streams:
            size_bytes = 0
            while not body.complete:
                message = await body._next()
                size_bytes += len(message.get("body", b""))
                if size_bytes > MAX_BODY_BYTES:
                    raise TooLarge(f"a body of this kind may have {MAX_BODY_BYTES} bytes", code="request_too_large")
                body._buffered.append(message)
            body._buffered.reverse()
        return body

    async def receive(self) -> Message:
        return self._buffered.pop() if self._buffered else await self._next()

    async def drain(self) -> None:
        """Read what is left, for its fingerprint alone."""
        while not self.complete and self.streams:
            await self._next()

    def fingerprint(self) -> str:
        hasher = self._hash.copy()
        hasher.update(self._rest)
        return str(hasher.hexdigest())

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._count(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        elif not self.complete:
            self.complete = True
            self._rest += b"\0gone"  # half a body is no body
        return message

    def _count(self, data: bytes) -> None:
        if self._boundary is None:
            self._hash.update(data)
            return
        *whole, rest = (self._rest + data).split(self._boundary)
        for piece in whole:
            self._hash.update(piece + b"\0part")
        # The beginning of a boundary may stand at the end.
        held = min(len(rest), len(self._boundary) - 1)
        self._hash.update(rest[: len(rest) - held])
        self._rest = rest[len(rest) - held :]


class _Recorder:
    """Passes a response on, and remembers it if it is small and whole: before its end is sent, so that whoever has
    seen that may send the request again at once."""

    def __init__(self, send: Send, end: Callable[[Json | None], Awaitable[None]], *, keep: bool) -> None:
        self._send = send
        self._end = end
        self._keep = keep
        self._status = 0
        self._type = ""
        self._body = bytearray()
        self.ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._type = message["status"], Headers(raw=message["headers"]).get("content-type", "")
        elif message["type"] == "http.response.body":
            if self._keep and len(self._body) <= MAX_KEPT_BYTES:
                self._body += message.get("body", b"")
            if not message.get("more_body", False):
                self.ended = True
                await self._end(self._kept())
        await self._send(message)

    def _kept(self) -> Json | None:
        """What is to be kept of it; None where the key must be free again."""
        if not 200 <= self._status < 300:
            return None
        if not self._keep or self._type != "application/json" or len(self._body) > MAX_KEPT_BYTES:
            return {"state": "again"}
        return {"state": "done", "status": self._status, "body": self._body.decode()}


class _Claim:
    """The record of one key: open while its request runs, then what became of it."""

    def __init__(self, objects: Objects, tenant: str, name: str, path: str) -> None:
        self._objects = objects
        self._tenant = tenant
        self._name = name
        self._path = path
        self._held: StoredObject | None = None
        self._saving = threading.Lock()

    def take(self, fingerprint: str | None) -> Json | None:
        """None: the key is ours now. Otherwise what is known of its first request. Raises KeyReused, Conflict."""
        for _ in range(3):
            now = time.time()
            data = {"path": self._path, "state": "open", "fingerprint": fingerprint, "until": now + LEASE_S}
            try:
                self._held = self._objects.create("idempotency", self._tenant, self._name, data, due_at=now + KEPT_S)
                return None
            except ObjectExists:
                pass
            try:
                stored = self._objects.get("idempotency", self._tenant, self._name)
                if stored.created_at + KEPT_S <= now:
                    self._objects.delete("idempotency", self._tenant, self._name)
                    continue
                if stored.data["path"] != self._path:
                    raise KeyReused(f"this Idempotency-Key came with POST {stored.data['path']} before")
                if stored.data["state"] != "open" or stored.data["until"] > now:
                    return stored.data
                if fingerprint is not None and stored.data["fingerprint"] not in (None, fingerprint):
                    return stored.data
                self._held = self._objects.replace(stored, data, due_at=stored.created_at + KEPT_S)
                return None
            except (UnknownObject, ObjectChanged):
                continue
        raise Conflict("another request with this Idempotency-Key is under way")

    @contextlib.asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        if self._held is None:
            yield
            return
        renewing = asyncio.create_task(self._renew())  # not in a task group, which would wrap what the request raises
        try:
            yield
        finally:
            renewing.cancel()

    async def _renew(self) -> None:
        while self._held is not None:
            await asyncio.sleep(LEASE_S / 3)
            with contextlib.suppress(QueueUnavailable):  # the store may be back before the lease runs out
                await to_thread.run_sync(self._save, {"until": time.time() + LEASE_S})

    def end(self, kept: Json | None, fingerprint: str | None) -> None:
        if self._held is None:
            return
        if kept is None or fingerprint is None:
            self._objects.delete("idempotency", self._tenant, self._name)
        else:
            self._save({**kept, "fingerprint": fingerprint})

    def _save(self, change: Json) -> None:
        with self._saving:  # the lease may be renewed at the very end of the request
            held = self._held
            if held is not None:
                try:
                    self._held = self._objects.replace(held, {**held.data, **change}, due_at=held.created_at + KEPT_S)
                except ObjectChanged:  # taken over after a stall: the record is another request's
                    self._held = None


def _replay(kept: Json) -> Response:
    response = Response(kept["body"], status_code=kept["status"], media_type="application/json")
    MutableHeaders(raw=response.raw_headers)["idempotent-replayed"] = "true"
    return response
