"""What every stage is handed."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.chain import TokenIds
from engine.errors import InvalidRequest
from engine.interfaces import Engine
from service.admission import Admission
from service.documents.base import DocumentRecord, Documents, UnknownRecord
from service.kv_policy import KeepsPolicies
from service.leases import LeaseKeeper
from service.logs import log_fields
from service.metrics import Metrics
from service.prompt import PromptFormat
from service.queue.base import Job, Queue
from service.salt import tenant_salt
from service.settings import Settings
from service.traces import Traces, trace_id_of


class TokenizerChanged(InvalidRequest):
    """The document's token ids mean nothing to the model that is served now."""

    code = "tokenizer_changed"


class KVHolders(KeepsPolicies, Protocol):
    """Whose KV is kept (engine.kv_store.KVCatalog); `discard` drops what an unfinished prefill left."""

    def discard(self, owner: str) -> int: ...


@dataclass(frozen=True)
class StageContext:
    settings: Settings
    queue: Queue
    documents: Documents
    engine: Engine
    kv: KVHolders
    prompts: PromptFormat
    model_id: str
    leases: LeaseKeeper
    metrics: Metrics
    secret: bytes
    clock: Callable[[], float]  # unix seconds
    device: str = "cpu"
    traces: Traces = field(default_factory=Traces)
    admission: Admission = field(default_factory=Admission)

    def salt(self, tenant: str) -> bytes:
        return tenant_salt(self.secret, tenant)

    def document_tokens(self, document: DocumentRecord) -> TokenIds:
        """[tokens] uint32, mapped and not read. Raises OSError, ValueError when the folder is damaged."""
        tokens: TokenIds = np.load(self.settings.files_dir / document.folder / "tokens.npy", mmap_mode="r")
        return tokens

    def prefix(self, tenant: str, document_ids: list[str]) -> TokenIds:
        """The cacheable prefix over these documents of `tenant`.

        Raises UnknownRecord, TokenizerChanged, OSError, ValueError.
        """
        documents = [self.documents.document(document_id) for document_id in document_ids]
        for document in documents:
            if document.tenant != tenant:
                raise UnknownRecord(f"no document {document.id!r}")
            if document.tokenizer_digest != self.prompts.tokenizer.digest:
                raise TokenizerChanged(f"{document.id} was read with another model's tokenizer: upload it again")
        return self.prompts.document_prefix([self.document_tokens(document) for document in documents])

    def claimed(self, job: Job) -> None:
        """Note how long it waited; at its first attempt, since later ones would count the earlier ones' work."""
        if job.attempts > 1:
            return
        now = self.clock()
        waited_s = max(0.0, now - job.created_at)
        self.metrics.stage_seconds.labels("queue").observe(waited_s)
        self.metrics.tenant_queue_seconds.labels(self.metrics.tenant(job.tenant)).observe(waited_s)
        attributes = {"foreword.job.id": job.id, "foreword.job.kind": job.kind}
        self.traces.stage("queue", job.payload.get("traceparent"), job.created_at, now, attributes)

    def kind_of(self, holder: str) -> str:
        """The class of what a KV holder holds: repo, bundle or doc; several for a prefix over many documents."""
        document_id = holder.partition(":")[0]
        if not document_id.startswith("doc-"):
            return "several"
        try:
            document = self.documents.document(document_id)
            kind: str = json.loads(self.manifest(document).read_bytes())["kind"]
        except (UnknownRecord, OSError, ValueError, KeyError):  # deleted meanwhile
            return "several"
        return kind

    def manifest(self, document: DocumentRecord) -> Path:
        return self.settings.files_dir / document.folder / "manifest.json"


def logged(job: Job) -> AbstractContextManager[None]:
    """Log lines within are this job's."""
    origin = job.payload
    trace_id = trace_id_of(origin.get("traceparent"))
    return log_fields(job_id=job.id, request_id=origin.get("request_id"), trace_id=trace_id, stage=job.kind)
