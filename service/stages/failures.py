"""What an exception means for the job it ended: the error that users see, and whether trying again can help."""

from dataclasses import dataclass

from engine.errors import EngineError, InvalidRequest, ModelError, StorageFull
from service.documents.base import Json, UnknownRecord
from service.ingest.base import IngestError
from service.queue.base import QueueUnavailable


@dataclass(frozen=True)
class Failure:
    error: Json  # {"code", "message"}
    retry: bool


def failure_of(error: Exception) -> Failure:
    """Messages of our own errors are for users; of others only the type is named, since they may quote documents."""
    match error:
        case IngestError(code="document_too_long"):
            return _final("context_length_exceeded", error.message)
        case IngestError():
            return _final(error.code, error.message)
        case InvalidRequest() | ModelError() | StorageFull():
            return _final(error.code, str(error))
        case EngineError():
            return Failure({"code": error.code, "message": str(error)}, retry=True)
        case UnknownRecord():
            return _final("document_deleted", f"{error}: it was deleted before this could be done")
        case QueueUnavailable():
            return Failure({"code": "unavailable", "message": "the job store was unavailable"}, retry=True)
        case MemoryError():
            return Failure({"code": "out_of_memory", "message": "the worker ran out of memory"}, retry=True)
        case OSError():
            reason = error.strerror or type(error).__name__
            return Failure({"code": "io_error", "message": f"reading or writing failed: {reason}"}, retry=True)
    return Failure({"code": "internal_error", "message": f"the worker failed with {type(error).__name__}"}, retry=True)


def _final(code: str, message: str) -> Failure:
    return Failure({"code": code, "message": message}, retry=False)
