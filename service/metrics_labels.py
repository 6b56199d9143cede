"""Labels found fast, and those that others choose in bounded number: each new one would be a series for good."""

import re
import threading
from collections.abc import Iterable
from typing import Any

import prometheus_client

OTHER = "other"
MOST_TENANTS = 50
MOST_CODES = 64
_CODE = re.compile(r"[a-z][a-z0-9_]{0,39}")


class _Remembered:
    """`labels` from a dict: the library's own lookup takes a lock and makes strings, 1 µs each time."""

    def labels(self, *labelvalues: Any, **labelkwargs: Any) -> Any:
        found: dict[tuple[Any, ...], Any] = self.__dict__.setdefault("_found", {})
        child = found.get(labelvalues)
        if child is None:
            child = found[labelvalues] = super().labels(*labelvalues, **labelkwargs)  # type: ignore[misc]
        return child


class Counter(_Remembered, prometheus_client.Counter):
    pass


class Histogram(_Remembered, prometheus_client.Histogram):
    pass


class Summary(_Remembered, prometheus_client.Summary):
    pass


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
