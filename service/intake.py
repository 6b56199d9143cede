"""From an upload to a file record and its ingest job: both durable, together, before the caller hears of it."""

import secrets
import time
from dataclasses import asdict
from typing import Any

from anyio import to_thread
from blake3 import blake3
from pydantic import ValidationError
from starlette.requests import Request

from service.dependencies import Services, load_json
from service.documents.base import FileRecord, UnknownRecord
from service.errors import Conflict, InvalidRequest, NotFound, from_validation
from service.middleware import principal_of
from service.payloads import IngestPayload, origin_of
from service.queue.base import Effects, NewJob, RecordChange
from service.schemas import UploadOptions
from service.uploads import Upload, clean_name
from service.webhooks import watch_file

INLINE_LIFETIME_S = 3600.0
BYTES_PER_TOKEN = 4  # for fairness, until the real count is known
_EXPIRY_FIELDS = ("expires_after[anchor]", "expires_after[seconds]")


async def take_upload(services: Services, request: Request, tenant: str, *, single: bool) -> FileRecord:
    """Receive a multipart request as a new file handle, of exactly one file if `single`.

    With an Idempotency-Key that was used before, the handle it made is returned. Raises ApiError.
    """
    started = time.time()
    key = request.headers.get("idempotency-key")
    file_id = derived_id(tenant, key) if key else new_id()
    if key and (known := await to_thread.run_sync(_find_or_clear, services, tenant, file_id)):
        return known
    try:
        quota_bytes = principal_of(request.scope).limits.stored_bytes
        async with services.uploads.open(file_id, tenant, quota_bytes=quota_bytes) as upload:
            length = request.headers.get("content-length", "")
            await services.uploads.receive(
                upload,
                request.headers.get("content-type", ""),
                int(length) if length.isdigit() else None,
                request.stream(),
            )
            if not upload.sources:
                raise InvalidRequest(
                    "no file was sent: a multipart part named 'file' with a filename is expected",
                    param="file",
                    code="missing_required_parameter",
                )
            if single and len(upload.sources) > 1:
                raise InvalidRequest(
                    f"one file is expected, got {len(upload.sources)}: /v1/documents takes several", param="file"
                )
            options = read_options(upload.fields, purpose_needed=single)
            return await keep(services, tenant, upload, options, started_at=started, request=request)
    except FileExistsError as error:
        raise Conflict("another request with this Idempotency-Key is under way") from error


async def keep(
    services: Services, tenant: str, upload: Upload, options: UploadOptions, *, started_at: float, request: Request
) -> FileRecord:
    """Make received bytes a file handle. Raises EmptyInput, InvalidRequest."""
    if options.base is not None and await to_thread.run_sync(find_file, services, tenant, options.base) is None:
        raise InvalidRequest(f"base: no file {options.base!r}", param="base")
    now = time.time()
    ingested = options.purpose != "batch"
    record = FileRecord(
        id=upload.id,
        tenant=tenant,
        filename=clean_name(options.filename) if options.filename else _name_of(upload),
        purpose=options.purpose,
        size_bytes=upload.size_bytes,
        created_at=now,
        expires_at=None if options.expires_after_s is None else now + options.expires_after_s,
        kind=options.kind,
        fidelity=options.fidelity,
        priority=options.priority,
        base=options.base,
        pinned=options.pin,
        kv_ttl_s=options.kv_ttl_s,
        sources=upload.sources,
        # Bytes that are only stored have nothing left to wait for.
        status="uploaded" if ingested else "processed",
        status_details=None,
        error=None,
        # Of a handle's own: an id that a key or the bytes give comes again, long before the queue forgets its job.
        ingest_job=f"ingest-{upload.id}-{secrets.token_hex(4)}" if ingested else None,
        document_id=None,
    )
    payload: IngestPayload = {
        "file_id": record.id,
        "upload_seconds": now - started_at,
        **origin_of(request.scope["state"]),
    }

    def write() -> None:
        if record.ingest_job is None:
            services.documents.create_file(record)
            return
        job = NewJob(
            kind="ingest",
            tenant=tenant,
            payload=payload,
            priority=record.priority,
            cost_tokens=record.size_bytes // BYTES_PER_TOKEN,
            job_id=record.ingest_job,
            max_attempts=services.settings.max_attempts,
        )
        services.queue.put(job, Effects(changes=[RecordChange("files", record.id, asdict(record))]))

    if ingested:
        await to_thread.run_sync(watch_file, services.objects, tenant, record.id)
    await services.uploads.commit(upload, write)
    services.metrics.uploaded_bytes.inc(record.size_bytes)
    ended_at = time.time()
    services.metrics.stage_seconds.labels("upload").observe(max(0.0, ended_at - started_at))
    services.traces.stage(
        "upload",
        request.state.traceparent,
        started_at,
        ended_at,
        {"foreword.upload.bytes": record.size_bytes, "foreword.file.id": record.id},
    )
    return record


async def take_inline(services: Services, request: Request, tenant: str, filename: str, data: bytes) -> FileRecord:
    """A file given inside a chat request: a handle that lives one hour from its last use.

    The same bytes under the same name are the same handle, so a conversation that repeats them uploads once.
    """
    file_id = derived_id(tenant, "inline", filename, data)
    known = await to_thread.run_sync(_find_or_clear, services, tenant, file_id)
    if known is not None and known.status != "error":
        expiry = {"expires_at": time.time() + INLINE_LIFETIME_S}
        await to_thread.run_sync(services.documents.update_file, known.id, expiry)
        return known
    if known is not None:
        file_id = new_id()
    options = UploadOptions(expires_after_s=int(INLINE_LIFETIME_S))
    try:
        quota_bytes = principal_of(request.scope).limits.stored_bytes
        async with services.uploads.open(file_id, tenant, quota_bytes=quota_bytes) as upload:
            await services.uploads.receive_bytes(upload, filename, data)
            return await keep(services, tenant, upload, options, started_at=time.time(), request=request)
    except FileExistsError as error:
        raise Conflict("the same file is being sent by another request") from error


def find_file(services: Services, tenant: str, file_id: str) -> FileRecord | None:
    """A handle that this tenant has and that hasn't expired."""
    try:
        record = services.documents.file(tenant, file_id)
    except UnknownRecord:
        return None
    return None if has_expired(record) else record


def _find_or_clear(services: Services, tenant: str, file_id: str) -> FileRecord | None:
    """As `find_file`; an expired handle that still waits for its removal makes way for a new one of its id."""
    try:
        record = services.documents.file(tenant, file_id)
        if not has_expired(record):
            return record
        services.documents.delete_file(tenant, file_id)
    except UnknownRecord:
        return None
    services.uploads.remove(file_id)
    return None


def has_expired(record: FileRecord) -> bool:
    """Its time is over, whether or not it has been removed yet."""
    return record.expires_at is not None and record.expires_at <= time.time()


def get_file(services: Services, tenant: str, file_id: str) -> FileRecord:
    """Raises NotFound."""
    record = find_file(services, tenant, file_id)
    if record is None:
        raise NotFound(f"No such File object: {file_id}", param="id", code="file_not_found")
    return record


def read_options(fields: dict[str, str], *, purpose_needed: bool) -> UploadOptions:
    """Form fields, and a JSON object in a field named `options`. Raises InvalidRequest."""
    values: dict[str, Any] = {name: value for name, value in fields.items() if value != ""}
    extra = values.pop("options", None)
    if extra is not None:
        try:
            values |= load_json(extra)
        except (ValueError, TypeError) as error:
            raise InvalidRequest("options: a JSON object is expected", param="options") from error
    anchor, seconds = (values.pop(name, None) for name in _EXPIRY_FIELDS)
    nested = values.pop("expires_after", None)
    if isinstance(nested, dict):
        anchor, seconds = nested.get("anchor"), nested.get("seconds")
    if anchor not in (None, "created_at"):
        raise InvalidRequest(f"anchor 'created_at' is expected, got {anchor!r}", param=_EXPIRY_FIELDS[0])
    if seconds is not None:
        values["expires_after_s"] = seconds
    if purpose_needed and "purpose" not in values:
        raise InvalidRequest(
            "purpose: 'user_data', 'assistants' or 'batch' is expected",
            param="purpose",
            code="missing_required_parameter",
        )
    try:
        return UploadOptions.model_validate(values)
    except ValidationError as error:
        wrong = from_validation(error)
        wrong.param = _EXPIRY_FIELDS[1] if wrong.param == "expires_after_s" else wrong.param
        raise wrong from error


def new_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def derived_id(tenant: str, *parts: str | bytes) -> str:
    """The id that this tenant's same request always gets."""
    hasher = blake3(tenant.encode())
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little") + data)
    return f"file-{hasher.hexdigest()[:24]}"


def _name_of(upload: Upload) -> str:
    first = str(upload.sources[0]["filename"])
    more = len(upload.sources) - 1
    return f"{first} and {more} more" if more else first
