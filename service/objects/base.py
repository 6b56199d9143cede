"""Small records of the API: uploads in parts, responses, batches, webhooks, idempotency keys.

One contract for all of them, so that a backend writes it once: JSON under a version, and a time at which somebody must
look after it. Who claims an object that is due holds it for a lease; every change goes by the version, so a process
that lost its lease changes nothing. Every backend passes tests/contracts/objects_contract.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Json = Mapping[str, Any]
ObjectKind = Literal["upload", "response", "batch", "endpoint", "delivery", "watch", "idempotency"]
Order = Literal["asc", "desc"]


class ObjectsError(Exception):
    """Base of this contract's errors."""


class UnknownObject(ObjectsError):
    """No such object of this tenant."""


class ObjectExists(ObjectsError):
    """An object with this id is there already."""


class ObjectChanged(ObjectsError):
    """Somebody else changed or deleted it since it was read. Nothing was written."""


@dataclass(frozen=True)
class StoredObject:
    kind: ObjectKind
    tenant: str
    id: str
    data: Json
    version: int  # raised by each write and each claim
    created_at: float  # unix seconds
    due_at: float | None  # from then on `claim_due` hands it out


class Objects(Protocol):
    """Blocking; thread-safe; any number of processes. Everything written is durable when the call returns."""

    def create(
        self, kind: ObjectKind, tenant: str, object_id: str, data: Json, *, due_at: float | None = None
    ) -> StoredObject:
        """Raises ObjectExists."""
        ...

    def get(self, kind: ObjectKind, tenant: str, object_id: str) -> StoredObject:
        """Raises UnknownObject."""
        ...

    def find(
        self, kind: ObjectKind, tenant: str, *, limit: int, after: str | None = None, order: Order = "desc"
    ) -> Sequence[StoredObject]:
        """By creation. Raises UnknownObject when `after` is none of this tenant's."""
        ...

    def replace(self, stored: StoredObject, data: Json, *, due_at: float | None) -> StoredObject:
        """Raises ObjectChanged."""
        ...

    def delete(self, kind: ObjectKind, tenant: str, object_id: str) -> None:
        """Nothing happens where it is gone already."""
        ...

    def claim_due(self, kind: ObjectKind, *, lease_s: float, limit: int) -> Sequence[StoredObject]:
        """Objects whose time has come, longest due first; each is due again after `lease_s` unless it is replaced."""
        ...

    def count_due(self, kind: ObjectKind) -> int:
        """How many have a time at which they are due, now or later."""
        ...
