"""How long and how firmly a document's KV is kept: by the most demanding of its handles."""

from dataclasses import dataclass
from typing import Protocol

from service.documents.base import Documents


class KeepsPolicies(Protocol):
    """engine.kv_store.KVCatalog."""

    def set_policy(self, holder: str, *, ttl_s: float | None, pinned: bool) -> None: ...


@dataclass(frozen=True)
class KVPolicy:
    ttl_s: float | None
    pinned: bool


def kv_policy(documents: Documents, document_id: str, fidelity: str) -> KVPolicy:
    handles = [handle for handle in documents.handles(document_id) if handle.fidelity == fidelity]
    lives = [handle.kv_ttl_s for handle in handles]
    finite = [life for life in lives if life is not None]
    unlimited = not lives or len(finite) < len(lives)
    return KVPolicy(None if unlimited else max(finite), any(handle.pinned for handle in handles))


def apply_kv_policy(documents: Documents, kv: KeepsPolicies, document_id: str, fidelity: str) -> None:
    """Due whenever a handle came, changed or went."""
    policy = kv_policy(documents, document_id, fidelity)
    kv.set_policy(f"{document_id}:{fidelity}", ttl_s=policy.ttl_s, pinned=policy.pinned)


def delete_handle(documents: Documents, kv: KeepsPolicies, tenant: str, file_id: str) -> None:
    """End a handle, and with it what it alone asked for: its pin must not outlive it. Raises UnknownRecord."""
    file = documents.file(tenant, file_id)
    if documents.delete_file(tenant, file_id) is None and file.document_id is not None:
        apply_kv_policy(documents, kv, file.document_id, file.fidelity)
