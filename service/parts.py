"""Uploads in parts: an object says what is expected, each part is a file, and the last request puts them together.

A part counts once its file has its final name, so parts come in any order, at once, and through any API process.
Expiry and cancellation remove the files; a crash at any point leaves the upload as it was.
"""

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anyio import to_thread
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from service.auth import Principal
from service.background import Held
from service.dependencies import Services
from service.documents.base import FileRecord, UnknownRecord
from service.errors import Conflict, InvalidRequest, NotFound
from service.intake import derived_id, find_file, keep, read_options
from service.kv_policy import delete_handle
from service.objects.base import Json, ObjectChanged, ObjectExists, StoredObject, UnknownObject
from service.uploads import Upload, fsync_folder
from service.views import file_view

PART_BYTES = 64 << 20
LIFETIME_S = 3600.0
KEPT_S = 24 * 3600.0  # so long one can still ask what became of an upload
_ENVELOPE = frozenset({"bytes", "mime_type", "filename"})


class Expected(BaseModel):
    """What the service needs to know beside the options of any file."""

    model_config = ConfigDict(extra="ignore")

    bytes: int = Field(ge=1)
    filename: str = Field(min_length=1, max_length=255)
    mime_type: str = Field(min_length=1, max_length=255)


class Completion(BaseModel):
    model_config = ConfigDict(extra="forbid")

    part_ids: list[str] = Field(min_length=1, max_length=100_000)
    md5: str | None = None


class PartUploads:
    """The uploads of one API process."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def create(self, principal: Principal, body: dict[str, Any], key: str | None) -> StoredObject:
        """Raises InvalidRequest, ValidationError, TooLarge, StorageExhausted, QuotaExceeded."""
        expected = Expected.model_validate(body)
        options = {name: value for name, value in body.items() if name not in _ENVELOPE}
        read_options(options, purpose_needed=True)
        self._services.uploads.check_room(expected.bytes)
        self._services.uploads.check_quota(principal.tenant, principal.limits.stored_bytes, expected.bytes)
        now, upload_id = time.time(), _new_id("upload", principal.tenant, key)
        data = {**expected.model_dump(), "options": options, "status": "pending", "expires_at": now + LIFETIME_S}
        try:
            return self._services.objects.create("upload", principal.tenant, upload_id, data, due_at=now + LIFETIME_S)
        except ObjectExists:
            return self.get(principal.tenant, upload_id)

    def get(self, tenant: str, upload_id: str) -> StoredObject:
        """Raises NotFound."""
        try:
            return self._services.objects.get("upload", tenant, upload_id)
        except UnknownObject as error:
            raise NotFound(f"No such Upload object: {upload_id}", param="upload_id", code="upload_not_found") from error

    def view(self, stored: StoredObject, file: FileRecord | None = None) -> dict[str, Any]:
        """An upload in the OpenAI shape; `file` once it is completed."""
        if file is None and stored.data["status"] == "completed":
            file = find_file(self._services, stored.tenant, stored.data["file_id"])
        return {
            "id": stored.id,
            "object": "upload",
            "bytes": stored.data["bytes"],
            "created_at": int(stored.created_at),
            "expires_at": int(stored.data["expires_at"]),
            "filename": stored.data["filename"],
            "purpose": stored.data["options"]["purpose"],
            "status": _status(stored),
            "file": None if file is None else file_view(file),
        }

    async def add_part(self, request: Request, principal: Principal, upload_id: str) -> dict[str, Any]:
        """Receive one part; on disk when this returns. Raises NotFound, InvalidRequest, TooLarge and as any upload."""
        tenant = principal.tenant
        stored = await to_thread.run_sync(self._pending, tenant, upload_id)
        part_id = _new_id("part", tenant, request.headers.get("idempotency-key"))
        uploads = self._services.uploads
        try:
            quota_bytes = principal.limits.stored_bytes
            opened = uploads.open(part_id, tenant, quota_bytes=quota_bytes, most_bytes=PART_BYTES)
            async with opened as part:
                length = request.headers.get("content-length", "")
                content_type = request.headers.get("content-type", "")
                await uploads.receive(part, content_type, int(length) if length.isdigit() else None, request.stream())
                if len(part.sources) != 1 or part.size_bytes == 0:
                    raise InvalidRequest(
                        "one part of at least one byte is expected, in a multipart field named 'data' with a filename",
                        param="data",
                    )
                await to_thread.run_sync(self._keep_part, stored, part)
        except FileExistsError as error:
            raise Conflict("another request with this Idempotency-Key is under way") from error
        return {"id": part_id, "object": "upload.part", "created_at": int(time.time()), "upload_id": upload_id}

    async def complete(
        self, request: Request, principal: Principal, upload_id: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        """Put the parts together, in the given order. Raises NotFound, InvalidRequest and as any upload."""
        wanted, tenant = Completion.model_validate(body), principal.tenant
        stored = await to_thread.run_sync(self.get, tenant, upload_id)
        if stored.data["status"] == "completed":
            return await to_thread.run_sync(self.view, stored)
        stored = await to_thread.run_sync(self._pending, tenant, upload_id)
        file_id = derived_id(tenant, "upload", upload_id)
        file = await to_thread.run_sync(find_file, self._services, tenant, file_id)
        if file is None:
            file = await self._assemble(request, principal, stored, wanted, file_id)
        try:
            done = {**stored.data, "status": "completed", "file_id": file_id}
            stored = await to_thread.run_sync(self._end, stored, done)
        except ObjectChanged as error:
            await to_thread.run_sync(self._discard_file, tenant, file_id)
            raise _closed(await to_thread.run_sync(self.get, tenant, upload_id)) from error
        return await to_thread.run_sync(self.view, stored, file)

    def cancel(self, tenant: str, upload_id: str) -> StoredObject:
        """Raises NotFound, InvalidRequest, Conflict."""
        stored = self._pending(tenant, upload_id)
        try:
            return self._end(stored, {**stored.data, "status": "cancelled"})
        except ObjectChanged as error:
            raise Conflict("the upload was changed by another request at the same time") from error

    async def keeper(self, held: Held) -> None:
        """Its time is over: one that waits expires, one that ended is forgotten."""
        if held.data["status"] == "pending":
            await held.save({"status": "expired"}, due_at=time.time() + KEPT_S)
        else:
            await held.delete()
        await to_thread.run_sync(self._remove_parts, held.stored)

    async def _assemble(
        self, request: Request, principal: Principal, stored: StoredObject, wanted: Completion, file_id: str
    ) -> FileRecord:
        paths = await to_thread.run_sync(self._parts, stored, wanted.part_ids)
        size_bytes = sum(path.stat().st_size for path in paths)
        if size_bytes != stored.data["bytes"]:
            raise InvalidRequest(
                f"the parts have {size_bytes} bytes, {stored.data['bytes']} were announced", param="part_ids"
            )
        uploads, hasher = self._services.uploads, hashlib.md5(usedforsecurity=False)
        try:
            async with uploads.open(
                file_id, principal.tenant, quota_bytes=principal.limits.stored_bytes, replaces_bytes=size_bytes
            ) as upload:
                await uploads.receive_files(upload, stored.data["filename"], paths, hasher if wanted.md5 else None)
                if wanted.md5 is not None and wanted.md5.lower() != hasher.hexdigest():
                    raise InvalidRequest(f"md5 is {hasher.hexdigest()}, {wanted.md5!r} was expected", param="md5")
                options = read_options(dict(stored.data["options"]), purpose_needed=True)
                return await keep(
                    self._services, principal.tenant, upload, options, started_at=stored.created_at, request=request
                )
        except FileExistsError as error:
            raise Conflict("another request completes this upload") from error

    def _pending(self, tenant: str, upload_id: str) -> StoredObject:
        stored = self.get(tenant, upload_id)
        if _status(stored) != "pending":
            raise _closed(stored)
        return stored

    def _folder(self, stored: StoredObject) -> Path:
        return self._services.uploads.parts_of(stored.tenant) / stored.id

    def _keep_part(self, stored: StoredObject, part: Upload) -> None:
        folder = self._folder(stored)
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            fsync_folder(folder.parent)
            fsync_folder(folder.parent.parent)
        received = part.folder / "0"
        with received.open("rb") as file:
            os.fsync(file.fileno())
        final = folder / part.id
        received.rename(final)
        fsync_folder(folder)
        try:
            self._pending(
                stored.tenant, stored.id
            )  # it may have ended meanwhile, its folder swept before this file came
        except InvalidRequest:
            final.unlink(missing_ok=True)
            raise

    def _parts(self, stored: StoredObject, part_ids: Sequence[str]) -> list[Path]:
        known = {path.name: path for path in self._folder(stored).glob("part-*")}
        for part_id in part_ids:
            if part_id not in known:
                raise InvalidRequest(f"part_ids: this upload has no part {part_id!r}", param="part_ids")
        if len(set(part_ids)) < len(part_ids):
            raise InvalidRequest("part_ids: a part is named twice", param="part_ids")
        return [known[part_id] for part_id in part_ids]

    def _end(self, stored: StoredObject, data: Json) -> StoredObject:
        ended = self._services.objects.replace(stored, data, due_at=time.time() + KEPT_S)
        self._remove_parts(stored)
        return ended

    def _remove_parts(self, stored: StoredObject) -> None:
        shutil.rmtree(self._folder(stored), ignore_errors=True)

    def _discard_file(self, tenant: str, file_id: str) -> None:
        try:
            delete_handle(self._services.documents, self._services.kv_store, tenant, file_id)
        except UnknownRecord:
            return
        self._services.uploads.remove(file_id)


def _new_id(kind: str, tenant: str, key: str | None) -> str:
    return f"{kind}-{secrets.token_hex(12) if key is None else derived_id(tenant, kind, key)[-24:]}"


def _status(stored: StoredObject) -> str:
    status = str(stored.data["status"])
    return "expired" if status == "pending" and stored.data["expires_at"] <= time.time() else status


def _closed(stored: StoredObject) -> InvalidRequest:
    return InvalidRequest(f"{stored.id} is {_status(stored)}: a pending upload is expected", code="upload_not_pending")
