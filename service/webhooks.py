"""Webhooks: who wants to hear of what, and the messages that are due to them, signed as Standard Webhooks say.

An endpoint belongs to its tenant. What happened becomes one delivery (service.objects) for each endpoint that asked for
it, made once however often it is announced; `service.deliveries` sends them.
"""

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field

from service.addresses import is_public, literal
from service.errors import InvalidRequest, NotFound
from service.objects.base import Json, ObjectExists, Objects, StoredObject, UnknownObject

EventType = Literal[
    "file.processed",
    "file.error",
    "response.completed",
    "response.failed",
    "response.incomplete",
    "response.cancelled",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
FILE_EVENTS = {"processed": "file.processed", "error": "file.error"}  # by a file's final status
FIRST_LOOK_S = 0.5
MAX_ENDPOINTS = 50  # a tenant
OLD_SECRET_S = 24 * 3600.0
SECRET_BYTES = 32
Name = Annotated[str, Field(min_length=1, max_length=255)]
Url = Annotated[str, Field(min_length=1, max_length=2000)]
Events = Annotated[list[EventType], Field(min_length=1, max_length=50)]


class NewEndpoint(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name
    url: Url
    event_types: Events


class EndpointPatch(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name | None = None
    url: Url | None = None
    event_types: Events | None = None


class Endpoints:
    """The webhook endpoints of one tenant."""

    def __init__(self, objects: Objects, tenant: str, *, allow_private: bool) -> None:
        self._objects = objects
        self._tenant = tenant
        self._allow_private = allow_private

    def create(self, wanted: NewEndpoint, key: str | None) -> StoredObject:
        """Raises InvalidRequest."""
        self._check(wanted.url)
        if len(self.all()) >= MAX_ENDPOINTS:
            raise InvalidRequest(f"{MAX_ENDPOINTS} webhook endpoints are there, more may not be")
        name = secrets.token_hex(12) if key is None else _derived(self._tenant, "endpoint", key)
        data = {**wanted.model_dump(), "secret": _new_secret(), "old_secret": None, "old_until": 0.0}
        try:
            return self._objects.create("endpoint", self._tenant, f"we_{name}", {**data, "updated_at": time.time()})
        except ObjectExists:  # made by the same request, sent before
            return self.get(f"we_{name}")

    def get(self, endpoint_id: str) -> StoredObject:
        """Raises NotFound."""
        try:
            return self._objects.get("endpoint", self._tenant, endpoint_id)
        except UnknownObject as error:
            message = f"No such webhook endpoint: {endpoint_id}"
            raise NotFound(message, param="webhook_endpoint_id", code="webhook_endpoint_not_found") from error

    def all(self) -> Sequence[StoredObject]:
        return self._objects.find("endpoint", self._tenant, limit=MAX_ENDPOINTS)

    def update(self, endpoint_id: str, patch: EndpointPatch) -> StoredObject:
        """Raises NotFound, InvalidRequest."""
        if patch.url is not None:
            self._check(patch.url)
        return self._change(endpoint_id, patch.model_dump(exclude_none=True))

    def rotate(self, endpoint_id: str, *, keep_old: bool) -> StoredObject:
        """A new secret; with `keep_old` messages are signed with both for a day. Raises NotFound."""
        old = self.get(endpoint_id).data["secret"]
        kept = {"old_secret": old, "old_until": time.time() + OLD_SECRET_S}
        forgotten = {"old_secret": None, "old_until": 0.0}
        return self._change(endpoint_id, {"secret": _new_secret(), **(kept if keep_old else forgotten)})

    def delete(self, endpoint_id: str) -> None:
        """What is due to it is never sent. Raises NotFound."""
        self.get(endpoint_id)
        self._objects.delete("endpoint", self._tenant, endpoint_id)

    def _change(self, endpoint_id: str, change: Json) -> StoredObject:
        stored = self.get(endpoint_id)
        if all(stored.data[name] == value for name, value in change.items()):
            return stored
        return self._objects.replace(stored, {**stored.data, **change, "updated_at": time.time()}, due_at=None)

    def _check(self, url: str) -> None:
        """What can be said without asking a name server: that is done anew at each delivery."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidRequest(f"url: {error}", param="url") from error
        schemes = ("https", "http") if self._allow_private else ("https",)
        odd = not url.isprintable() or " " in url
        if odd or parts.scheme not in schemes or not host or port == 0 or parts.username is not None:
            raise InvalidRequest(
                f"url: {' or '.join(schemes)}://host/path is expected, without spaces and a user name, got {url!r}",
                param="url",
            )
        address = literal(host)
        if address is not None and not self._allow_private and not is_public(address):
            raise InvalidRequest(f"url: {host} is no public address", param="url")


def endpoint_view(stored: StoredObject, *, with_secret: bool = False) -> dict[str, Any]:
    """In the OpenAI shape; the secret is shown when it is made, and never again."""
    data = stored.data
    view = {
        "id": stored.id,
        "object": "webhook_endpoint",
        "created_at": int(stored.created_at),
        "updated_at": int(data["updated_at"]),
        "name": data["name"],
        "url": data["url"],
        "event_types": list(data["event_types"]),
        "signing_secret_hint": f"whsec_…{data['secret'][-4:]}",
    }
    return {**view, "signing_secret": data["secret"]} if with_secret else view


def wants(objects: Objects, tenant: str, event_types: Iterable[str]) -> bool:
    """Whether any endpoint of the tenant asked for one of these."""
    asked = set(event_types)
    return any(asked & set(stored.data["event_types"]) for stored in _endpoints(objects, tenant))


def announce(objects: Objects, tenant: str, event_type: str, object_id: str) -> None:
    """Put a delivery to each endpoint that asked for it; announcing the same again changes nothing."""
    event_id = f"evt_{_derived(tenant, event_type, object_id)}"
    for endpoint in _endpoints(objects, tenant):
        if event_type in endpoint.data["event_types"]:
            data = {
                "endpoint": endpoint.id,
                "event_id": event_id,
                "body": event_body(event_id, event_type, object_id),
                "attempts": 0,
            }
            try:
                name = f"whd_{_derived(endpoint.id, event_id)}"
                objects.create("delivery", tenant, name, data, due_at=time.time())
            except ObjectExists:
                continue


def event_body(event_id: str, event_type: str, object_id: str) -> str:
    event = {"id": event_id, "object": "event", "created_at": int(time.time()), "type": event_type}
    return json.dumps({**event, "data": {"id": object_id}}, separators=(",", ":"))


def signed_headers(endpoint: StoredObject, event_id: str, body: str, now: float) -> dict[str, str]:
    """Standard Webhooks: HMAC-SHA256 over id, timestamp and body, base64, one for each secret that is valid."""
    data, timestamp = endpoint.data, int(now)
    keys = [data["secret"]] + ([data["old_secret"]] if data["old_secret"] and data["old_until"] > now else [])
    text = f"{event_id}.{timestamp}.{body}".encode()
    signatures = [hmac.new(base64.b64decode(key.removeprefix("whsec_")), text, hashlib.sha256) for key in keys]
    return {
        "content-type": "application/json",
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(one.digest()).decode()}" for one in signatures),
    }


def _endpoints(objects: Objects, tenant: str) -> Sequence[StoredObject]:
    return objects.find("endpoint", tenant, limit=MAX_ENDPOINTS)


def _new_secret() -> str:
    return f"whsec_{base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()}"


def _derived(*parts: str) -> str:
    hasher = blake3()
    for part in parts:
        hasher.update(len(part.encode()).to_bytes(4, "little") + part.encode())
    return str(hasher.hexdigest()[:32])


def watch_file(objects: Objects, tenant: str, file_id: str) -> None:
    """Due before the file's record is made, so that no crash in between loses the event."""
    if wants(objects, tenant, FILE_EVENTS.values()):
        try:
            objects.create("watch", tenant, file_id, {}, due_at=time.time() + FIRST_LOOK_S)
        except ObjectExists:
            return
