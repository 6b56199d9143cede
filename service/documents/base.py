"""What the service remembers: file handles, the documents they refer to, and each document's prefills.

A *file* is a handle: every upload makes a new one. Handles of identical content refer, counted, to one *document* =
(tenant, content_hash, tokenizer digest). A document has one *prefill* per fidelity. Records are changed either here or
as `Effects` of a job (service.queue.base), in one transaction with it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from service.documents.garbage import Garbage

Json = Mapping[str, Any]
FileStatus = Literal["uploaded", "processed", "error"]
DocumentState = Literal["ready", "error"]
PrefillState = Literal["queued", "running", "ready", "error", "cancelled"]
KVState = Literal["none", "stored", "stale"]


class UnknownRecord(Exception):
    """No such record for this tenant (or it was deleted)."""


@dataclass(frozen=True)
class FileRecord:
    id: str  # file-<24 hex>
    tenant: str
    filename: str
    purpose: str
    size_bytes: int
    created_at: float  # unix seconds
    expires_at: float | None
    kind: str  # auto | repo | bundle | doc
    fidelity: str  # default | strict | fast | exact
    priority: int
    base: str | None  # file id whose order is kept
    pinned: bool
    kv_ttl_s: float | None
    sources: Sequence[Json]  # [{"filename", "path"}]: uploaded bytes, paths relative to the data folder
    status: FileStatus
    status_details: str | None
    error: Json | None  # {"code", "message"}
    ingest_job: str | None
    document_id: str | None  # set when ingest is done


@dataclass(frozen=True)
class DocumentRecord:
    id: str  # doc-<24 hex of blake3(tenant, content_hash, tokenizer digest)>
    tenant: str
    content_hash: str
    stream_hash: str
    tokenizer_digest: str
    num_tokens: int
    folder: str  # document.txt, tokens.npy, manifest.json; relative to the data folder
    created_at: float
    stage_seconds: Json  # {"upload", "ingest", …}


@dataclass(frozen=True)
class PrefillRecord:
    id: str  # <document id>:<fidelity>; also the KV holder's name
    document_id: str
    tenant: str
    fidelity: str
    state: PrefillState
    job_id: str | None
    num_tokens: int | None  # of the whole prefix, template head included
    digest: str | None  # engine digest its KV was made under; another digest now means `stale`
    density: float | None
    recall: Json | None  # target, mean, p5, worst, below_target
    heads: Json | None  # pattern → count
    cached_tokens: int | None
    layers_recomputed: int | None
    cold_ttft_s: float | None
    seconds: float | None
    error: Json | None
    segments: Sequence[Json] | None = None  # start, end, density, mean, worst: engine.interfaces.SegmentRecall
    head_map: Sequence[str] | None = None  # a string a layer, a letter a KV-head group: engine.interfaces.PrefillResult


class Documents(Protocol):
    def create_file(self, record: FileRecord) -> None: ...

    def file(self, tenant: str, file_id: str) -> FileRecord:
        """Raises UnknownRecord."""
        ...

    def files(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None,
        order: Literal["asc", "desc"],
        purpose: str | None,
    ) -> Sequence[FileRecord]: ...

    def update_file(self, file_id: str, fields: Json) -> None: ...

    def delete_file(self, tenant: str, file_id: str) -> DocumentRecord | None:
        """Remove the handle. Returns the document if this was its last handle (its record and prefills are then
        gone too; the caller removes folder and KV). Raises UnknownRecord.

        Answers about a document that goes are scrubbed in the same step (`Queue.scrub`): running ones end `cancelled`
        with the error `document_deleted`."""
        ...

    def document(self, document_id: str) -> DocumentRecord: ...

    def prefill(self, prefill_id: str) -> PrefillRecord:
        """Raises UnknownRecord."""
        ...

    def known_documents(self, document_ids: Collection[str]) -> Mapping[str, DocumentRecord]:
        """Those of them that are there, by one question to the store."""
        ...

    def known_prefills(self, prefill_ids: Collection[str]) -> Mapping[str, PrefillRecord]:
        """Those of them that are there, by one question to the store."""
        ...

    def handles(self, document_id: str) -> Sequence[FileRecord]: ...

    def share_holder(self, holder: str, document_ids: Sequence[str]) -> None:
        """`holder` keeps KV of a prefix over these documents: it is garbage once any of them is deleted.

        Raises UnknownRecord when one of them is gone already.
        """
        ...

    def abandon_holder(self, holder: str) -> None:
        """KV was made for `holder`: where nobody names it (any more), it becomes garbage."""
        ...

    def expired_files(self, now: float) -> Sequence[FileRecord]: ...

    def uploaded_bytes(self, tenant: str | None = None) -> int:
        """Bytes of all uploads that a handle still names (of one tenant): what caps and quotas are held against."""
        ...

    def close(self) -> None: ...


class CollectedDocuments(Documents, Protocol):
    """What the workers' chores need besides."""

    def collect(self, remove: Callable[[Garbage], None]) -> int:
        """Hand each piece of garbage that nobody names again to `remove`, and forget it. Returns how many."""
        ...

    def folders(self) -> set[str]:
        """The folders that documents name, relative to the folder of files."""
        ...
