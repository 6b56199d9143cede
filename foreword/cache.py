"""`foreword cache`: look at stored KV and look after it. Works beside a running server: the index is shared."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from engine.kv_store import DiskLimits, KVCatalog
from service.settings import Settings


@contextmanager
def _catalog() -> Iterator[KVCatalog]:
    settings = Settings().resolved()
    limits = DiskLimits(settings.kv_disk_bytes, settings.disk_floor_bytes)
    catalog = KVCatalog(settings.data_dir / "kv", limits)
    try:
        yield catalog
    finally:
        catalog.close()


def list_entries() -> None:
    console = Console(width=None if Console().is_terminal else 160)
    with _catalog() as catalog:
        entries, usage = catalog.entries(), catalog.usage()
    table = Table("holder", "tokens", "MB", "segments", "missing", "pinned", "in use", "last used", "expires")
    for entry in entries:
        table.add_row(
            entry.holder or "(nobody)",
            f"{entry.num_tokens:,}",
            f"{entry.size_bytes / 1e6:.1f}",
            str(entry.num_segments),
            str(entry.missing_segments),
            "yes" if entry.pinned else "",
            "yes" if entry.in_use else "",
            _time(entry.used_at),
            _time(entry.expires_at),
        )
    console.print(table)
    console.print(", ".join(f"{tier}: {size / 1e6:.1f} MB" for tier, size in usage.items()))


def verify(holder: str | None) -> int:
    with _catalog() as catalog:
        _known(catalog, holder)
        report = catalog.verify(holder)
    print(f"{report.num_blocks} blocks checked, {len(report.bad)} bad")
    for bad in report.bad:
        print(f"removed {bad.copy.key[:16]} group {bad.group}: {bad.reason}")
    return int(bool(report.bad))


def evict(holder: str | None, size_bytes: int | None) -> None:
    with _catalog() as catalog:
        _known(catalog, holder)
        if any(entry.pinned for entry in catalog.entries() if entry.holder == holder):
            raise ValueError(f"the KV of {holder!r} is pinned; `foreword cache pin {holder} --off` first")
        freed = catalog.evict(holder=holder, size_bytes=size_bytes)
    print(f"{freed / 1e6:.1f} MB freed")


def pin(holder: str, *, pinned: bool) -> None:
    with _catalog() as catalog:
        _known(catalog, holder)
        catalog.pin(holder, pinned)
    print(f"{holder} {'pinned' if pinned else 'unpinned'}")


def _known(catalog: KVCatalog, holder: str | None) -> None:
    if holder is not None and all(entry.holder != holder for entry in catalog.entries()):
        raise ValueError(f"no KV is held by {holder!r}; `foreword cache ls` shows the names")


def _time(unix_s: float | None) -> str:
    return "" if unix_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
