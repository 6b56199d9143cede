"""What every stage is handed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.chain import TokenIds
from engine.errors import InvalidRequest
from engine.interfaces import Engine
from service.documents.base import DocumentRecord, Documents, UnknownRecord
from service.kv_policy import KeepsPolicies
from service.leases import LeaseKeeper
from service.metrics import Metrics
from service.prompt import PromptFormat
from service.queue.base import Queue
from service.salt import tenant_salt
from service.settings import Settings


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

    def salt(self, tenant: str) -> bytes:
        return tenant_salt(self.secret, tenant)

    def document_tokens(self, document: DocumentRecord) -> TokenIds:
        """[tokens] uint32, mapped and not read. Raises OSError, ValueError when the folder is damaged."""
        tokens: TokenIds = np.load(self.settings.data_dir / document.folder / "tokens.npy", mmap_mode="r")
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

    def manifest(self, document: DocumentRecord) -> Path:
        return self.settings.data_dir / document.folder / "manifest.json"
