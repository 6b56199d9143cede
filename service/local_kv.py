"""This machine's KV folder as its API process sees it."""

import json
from collections.abc import Mapping, Sequence

from engine.kv_store import KVCatalog, VerifyReport

_HELD = (
    "FROM holds h JOIN copies c ON c.key = h.key AND c.state = 'stored' {0}"
    "WHERE h.holder IN (SELECT value FROM json_each(?)) GROUP BY h.holder"
)
_SIZES = {
    "disk": f"SELECT h.holder, SUM(c.size_bytes) {_HELD.format('')}",
    "host": f"SELECT h.holder, SUM(r.size_bytes) {_HELD.format('JOIN host_residency r ON r.copy = c.id ')}",
}


class LocalKV:
    """Implements service.dependencies.KVDescriptions. The catalog stays the caller's to close."""

    def __init__(self, catalog: KVCatalog) -> None:
        self._catalog = catalog
        self.usage = catalog.usage
        self.set_policy = catalog.set_policy

    def describe(self, holders: Sequence[str]) -> Mapping[str, Mapping[str, int]]:
        """`KVCatalog.describe` of many at once, in a query a tier."""
        tiers = {holder: dict.fromkeys(_SIZES, 0) for holder in holders}
        names = json.dumps(list(holders))
        with self._catalog.index.snapshot() as db:
            for tier, query in _SIZES.items():
                for holder, size_bytes in db.execute(query, (names,)):
                    tiers[holder][tier] = size_bytes
        return tiers

    def verify(self, holder: str | None = None) -> VerifyReport:
        return self._catalog.verify(holder)
