"""Batches: many questions in one file, answered in their time; a file of answers and one of failures come back.

A batch is an object (service.objects) that a keeper works on under a lease. Each line's answer job has an id that
follows from batch and line, and each answer is appended to a file before it counts: a keeper that dies loses nothing,
and asks nothing twice.
"""

import secrets
import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.dependencies import Services
from service.errors import InvalidRequest, NotFound
from service.intake import derived_id, find_file
from service.objects.base import ObjectChanged, ObjectExists, Order, StoredObject, UnknownObject

WINDOW_S = 24 * 3600.0
RUNNING = frozenset({"validating", "in_progress", "finalizing"})


class OutputExpiry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class NewBatch(BaseModel):
    model_config = ConfigDict(extra="forbid")

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        default=None, max_length=16
    )
    output_expires_after: OutputExpiry | None = None


class Batches:
    """The batches of one tenant."""

    def __init__(self, services: Services, tenant: str) -> None:
        self._services = services
        self._tenant = tenant

    def create(self, wanted: NewBatch, key: str | None, origin: dict[str, Any]) -> StoredObject:
        """Raises InvalidRequest for an input file that can't be one."""
        file = find_file(self._services, self._tenant, wanted.input_file_id)
        if file is None or file.purpose != "batch":
            what = "no such file" if file is None else f"its purpose is {file.purpose!r}"
            raise InvalidRequest(
                f"input_file_id: {what}; a file uploaded with purpose 'batch' is expected", param="input_file_id"
            )
        name = secrets.token_hex(12) if key is None else derived_id(self._tenant, "batch", key)[-24:]
        now = time.time()
        data = {
            **wanted.model_dump(),
            "status": "validating",
            "times": {},
            "expires_at": now + WINDOW_S,
            "counts": {"total": 0, "completed": 0, "failed": 0},
            "errors": [],
            "files": {},
            "usage": None,
            "origin": origin,
        }
        try:
            return self._services.objects.create("batch", self._tenant, f"batch_{name}", data, due_at=now)
        except ObjectExists:  # made by the same request, sent before
            return self.get(f"batch_{name}")

    def get(self, batch_id: str) -> StoredObject:
        """Raises NotFound."""
        try:
            return self._services.objects.get("batch", self._tenant, batch_id)
        except UnknownObject as error:
            raise NotFound(f"No such Batch object: {batch_id}", param="batch_id", code="batch_not_found") from error

    def find(self, *, limit: int, after: str | None, order: Order = "desc") -> list[StoredObject]:
        """Raises NotFound when `after` is none of them."""
        try:
            return list(self._services.objects.find("batch", self._tenant, limit=limit, after=after, order=order))
        except UnknownObject as error:
            raise NotFound(f"No such Batch object: {after}", param="after", code="batch_not_found") from error

    def cancel(self, batch_id: str) -> StoredObject:
        """Its keeper sees to it. Nothing happens where it has ended. Raises NotFound."""
        while True:
            stored = self.get(batch_id)
            if stored.data["status"] not in RUNNING:
                return stored
            now = time.time()
            data = {**stored.data, "status": "cancelling", "times": {**stored.data["times"], "cancelling": now}}
            try:
                return self._services.objects.replace(stored, data, due_at=now)
            except ObjectChanged:
                continue


def batch_view(stored: StoredObject) -> dict[str, Any]:
    """In the OpenAI shape."""
    data, times = stored.data, stored.data["times"]

    def at(name: str) -> int | None:
        return int(times[name]) if name in times else None

    errors = {"object": "list", "data": data["errors"]} if data["errors"] else None
    return {
        "id": stored.id,
        "object": "batch",
        "endpoint": data["endpoint"],
        "model": None,
        "errors": errors,
        "input_file_id": data["input_file_id"],
        "completion_window": data["completion_window"],
        "status": data["status"],
        "output_file_id": data["files"].get("output"),
        "error_file_id": data["files"].get("error"),
        "created_at": int(stored.created_at),
        "in_progress_at": at("in_progress"),
        "expires_at": int(data["expires_at"]),
        "finalizing_at": at("finalizing"),
        "completed_at": at("completed"),
        "failed_at": at("failed"),
        "expired_at": at("expired"),
        "cancelling_at": at("cancelling"),
        "cancelled_at": at("cancelled"),
        "request_counts": data["counts"],
        "usage": data["usage"],
        "metadata": data["metadata"],
    }
