"""Label values that others choose, in bounded number: each new one would be a series for good."""

import re
import threading
from collections.abc import Iterable

OTHER = "other"
MOST_TENANTS = 50
MOST_CODES = 64
_CODE = re.compile(r"[a-z][a-z0-9_]{0,39}")


class TenantLabels:
    """The first MOST_TENANTS tenants by name, the rest as `other`: the same ones in every process, for ever."""

    def __init__(self, tenants: Iterable[str]) -> None:
        """`tenants` in the order of the keys file, which all processes of a server read."""
        self.names = tuple(dict.fromkeys(tenants))[:MOST_TENANTS]
        self._named = frozenset(self.names)

    def __call__(self, tenant: str) -> str:
        return tenant if tenant in self._named else OTHER


class CodeLabels:
    """Error codes as labels. A parsing child that hostile bytes took over could make up any number of them."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, code: str) -> str:
        if code in self._seen:
            return code
        with self._lock:
            if not _CODE.fullmatch(code) or len(self._seen) >= MOST_CODES:
                return OTHER
            self._seen.add(code)
        return code
