"""What the store holds, in figures."""

import sqlite3
from dataclasses import dataclass

_STORED_OF = "SELECT c.id FROM copies c JOIN holds h ON h.key = c.key WHERE c.state = 'stored' AND h.holder = ?"


@dataclass(frozen=True)
class CacheEntry:
    """What one holder holds; shared segments count for each of their holders."""

    holder: str | None  # None: segments that nobody holds (any more, or yet)
    num_segments: int  # stored
    num_tokens: int
    size_bytes: int
    missing_segments: int  # held, but evicted or never stored
    pinned: bool
    expires_at: float | None  # unix seconds, if not used before
    used_at: float | None
    in_use: bool  # being read


def holder_bytes(db: sqlite3.Connection, holder: str) -> dict[str, int]:
    disk = db.execute(f"SELECT COALESCE(SUM(size_bytes), 0) FROM copies WHERE id IN ({_STORED_OF})", (holder,))
    host = db.execute(
        f"SELECT COALESCE(SUM(size_bytes), 0) FROM host_residency WHERE copy IN ({_STORED_OF})", (holder,)
    )
    return {"disk": disk.fetchone()[0], "host": host.fetchone()[0]}


def tier_bytes(db: sqlite3.Connection) -> dict[str, int]:
    disk = db.execute("SELECT COALESCE(SUM(size_bytes), 0) FROM copies")
    host = db.execute("SELECT COALESCE(SUM(size_bytes), 0) FROM host_residency")
    return {"disk": disk.fetchone()[0], "host": host.fetchone()[0]}


def cache_entries(db: sqlite3.Connection) -> list[CacheEntry]:
    sums = (
        "COUNT(c.id), COALESCE(SUM(c.token_end - c.token_start), 0), COALESCE(SUM(c.size_bytes), 0), MAX(c.used_at),"
        " COALESCE(MAX(EXISTS (SELECT 1 FROM leases l WHERE l.copy = c.id)), 0)"
    )
    held = db.execute(
        f"SELECT p.name, p.pinned, p.ttl_s, p.set_at, COUNT(h.key), {sums} FROM holders p"
        " LEFT JOIN holds h ON h.holder = p.name LEFT JOIN copies c ON c.key = h.key AND c.state = 'stored'"
        " GROUP BY p.name ORDER BY MAX(c.used_at) DESC, p.name"
    )
    entries = [
        CacheEntry(
            holder=name,
            num_segments=stored,
            num_tokens=tokens,
            size_bytes=size,
            missing_segments=keys - stored,
            pinned=bool(pinned),
            expires_at=None if ttl_s is None or pinned else max(set_at, used_at or 0.0) + ttl_s,
            used_at=used_at,
            in_use=bool(in_use),
        )
        for name, pinned, ttl_s, set_at, keys, stored, tokens, size, used_at, in_use in held
    ]
    stored, tokens, size, used_at, in_use = db.execute(
        f"SELECT {sums} FROM copies c WHERE c.state = 'stored'"
        " AND NOT EXISTS (SELECT 1 FROM holds h WHERE h.key = c.key)"
    ).fetchone()
    if stored:
        entries.append(CacheEntry(None, stored, tokens, size, 0, False, None, used_at, bool(in_use)))
    return entries
