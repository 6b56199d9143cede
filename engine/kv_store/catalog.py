"""Who holds which stored KV, and the chores: everything but reading and writing it. Needs no layout and no model.

The API process uses this alone; the worker's `LocalKVStore` contains one.
"""

import json
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from engine.chain import Segment
from engine.kv_store.blocks import BlockFolder
from engine.kv_store.copies import Copy
from engine.kv_store.counters import Counters
from engine.kv_store.index import (
    EXPIRED,
    LEASED,
    PINNED,
    Index,
    doom,
    end_session,
    lease_copies,
    revive_released,
    select_copies,
    total_bytes,
    touch,
)
from engine.kv_store.recovery import recover, settle_orphans
from engine.kv_store.report import CacheEntry, cache_entries, holder_bytes, tier_bytes
from engine.kv_store.sessions import Session, remove_dead_files
from engine.kv_store.space import ORPHAN, DiskLimits, DiskSpace
from engine.kv_store.verify import VerifyReport, verify_copies

log = logging.getLogger("foreword.kv_store")

Clock = Callable[[], float]
_OF_HOLDER = "state = 'stored' AND key IN (SELECT key FROM holds WHERE holder = :holder)"
_ONLY_OF_HOLDER = (
    f"{_OF_HOLDER} AND NOT EXISTS (SELECT 1 FROM holds o WHERE o.key = copies.key AND o.holder != :holder)"
)


class KVCatalog:
    """The KV folder's index, its holders and its limits. Any number of processes may open the same folder."""

    def __init__(
        self,
        folder: Path,
        limits: DiskLimits,
        *,
        counters: Counters | None = None,
        orphan_ttl_s: float = 6 * 3600.0,
        clock: Clock = time.time,
        open_blocks: Callable[[Path], BlockFolder] = BlockFolder,
        several_machines: bool = False,
    ) -> None:
        """Opens `folder`, making it if needed, and puts it in order. Raises OSError, KVError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.counters = counters or Counters()
        self.clock, self._orphan_ttl_s = clock, orphan_ttl_s
        session_folder = folder / "sessions"
        self._session = Session(session_folder)
        self.session = self._session.id
        self._closed = False
        self._unended: set[str] = set()  # leases and ids of copies in writing whose end the index could not take
        self.blocks = open_blocks(folder / "blocks")
        path = folder / "index.sqlite3"
        self.index = Index(path, session_folder, self.counters, several_machines=several_machines)
        self.space = DiskSpace(self.index, self.blocks, limits, self.counters)
        with self.index.transaction() as db:
            db.execute("INSERT INTO sessions (id) VALUES (?)", (self.session,))
        recover(self.index, self.blocks, self.space, self.counters)
        remove_dead_files(session_folder)
        self.sweep()

    def attach(self, chain: Sequence[Segment], holder: str, *, ttl_s: float | None, pinned: bool) -> None:
        """Record that `holder` uses `chain`, besides what it holds already, and set its TTL (seconds) and pin.

        The TTL runs from the last use. Segments that are not stored (any more) are recorded all the same: they are
        held from the moment they are stored again. So a prefill may attach when it starts, and nothing of what it
        builds on can be released meanwhile.
        """
        keys = [segment.key for segment in chain]
        with self.index.transaction() as db:
            self._set_policy(db, holder, ttl_s, pinned)
            db.executemany("INSERT OR IGNORE INTO holds (key, holder) VALUES (?, ?)", [(key, holder) for key in keys])
            revive_released(db, keys)
            touch(db, keys, self.clock())

    def describe(self, holder: str) -> dict[str, int]:
        """Bytes of what `holder` holds, by tier; host memory counts all processes, as of their last finished read."""
        with self.index.snapshot() as db:
            return holder_bytes(db, holder)

    def usage(self) -> dict[str, int]:
        """Bytes in use, by tier; on disk with what is reserved for segments being written."""
        with self.index.snapshot() as db:
            return tier_bytes(db)

    def entries(self) -> list[CacheEntry]:
        """One entry a holder, and one with holder None for what nobody holds."""
        with self.index.snapshot() as db:
            return cache_entries(db)

    def verify(
        self, holder: str | None = None, *, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> VerifyReport:
        """Read and check every block of `holder`'s KV (None: all); bad segments are removed and counted.

        `on_progress(done, total)` is called in bytes.
        """
        lease, copies = self.lease(holder)
        try:
            report = verify_copies(copies, self.blocks, on_progress)
            for bad in report.bad:
                self.counters.add("checksum_failures" if bad.corrupt else "read_errors")
                self.condemn(bad.copy, "corrupt")
        finally:
            self.end_lease(lease)
        return report

    def holders_of(self, keys: Sequence[str]) -> list[tuple[str, float | None, bool]]:
        """Name, TTL in seconds and pin of each holder of any of the segments."""
        with self.index.snapshot() as db:
            rows = db.execute(
                "SELECT name, ttl_s, pinned FROM holders WHERE name IN"
                " (SELECT holder FROM holds WHERE key IN (SELECT value FROM json_each(?)))",
                (json.dumps(list(keys)),),
            )
            return [(name, ttl_s, bool(pinned)) for name, ttl_s, pinned in rows]

    def policies_since(self, set_at: float) -> list[tuple[str, float | None, bool]]:
        """Name, TTL in seconds and pin of the holders whose policy was set at `set_at` (unix seconds) or later."""
        with self.index.snapshot() as db:
            rows = db.execute("SELECT name, ttl_s, pinned FROM holders WHERE set_at >= ?", (set_at,))
            return [(name, ttl_s, bool(pinned)) for name, ttl_s, pinned in rows]

    def set_policy(self, holder: str, *, ttl_s: float | None, pinned: bool) -> None:
        """Change a holder's TTL (seconds from the last use, None: no limit) and pin; unknown holders are made."""
        with self.index.transaction() as db:
            self._set_policy(db, holder, ttl_s, pinned)

    def keep_to_cap(self) -> int:
        """Evict what is too much since the cap was lowered, as far as it may go. Returns the bytes freed.

        The worker's chore: a command line with other settings must not do it by merely looking.
        """
        with self.index.transaction() as db:
            self.index.reap_dead_sessions(db)
            excess = total_bytes(db) - self.space.limits.cap_bytes
            removable = self.space.least_needed(db, excess, now=self.clock()) if excess > 0 else []
        return self.space.remove(removable)

    def pin(self, holder: str, pinned: bool = True) -> None:
        """Pin or unpin what `holder` holds, leaving its TTL."""
        with self.index.transaction() as db:
            row = db.execute("SELECT ttl_s FROM holders WHERE name = ?", (holder,)).fetchone()
            self._set_policy(db, holder, row[0] if row else None, pinned)

    def release(self, holder: str) -> int:
        """Forget `holder` and remove what only it held. Returns the bytes freed now.

        Segments that are being read can't be matched any more at once; their bytes go when the last lease ends.
        """
        with self.index.transaction() as db:
            self.index.reap_dead_sessions(db)
            copies = select_copies(db, _ONLY_OF_HOLDER, {"holder": holder})
            doom(db, [copy.id for copy in copies], "released")
            db.execute("DELETE FROM holds WHERE holder = ?", (holder,))
            db.execute("DELETE FROM holders WHERE name = ?", (holder,))
            removable = self.space.removable(db, [copy.id for copy in copies])
        return self.space.remove(removable)

    def unfinished(self) -> set[str]:
        """Owners whose suspended or dead writers left something for a resume."""
        with self.index.transaction() as db:
            self.index.reap_dead_sessions(db)
            return {str(owner) for (owner,) in db.execute(f"SELECT DISTINCT owner FROM copies WHERE {ORPHAN}")}

    def discard(self, owner: str) -> int:
        """Remove what a suspended or dead writer of `owner` left for a resume. Returns the bytes freed."""
        with self.index.transaction() as db:
            self.index.reap_dead_sessions(db)
            copies = select_copies(db, f"{ORPHAN} AND owner = :owner", {"owner": owner})
            doom(db, [copy.id for copy in copies], "discarded")
        return self.space.remove(copies)

    def evict(self, *, holder: str | None = None, size_bytes: int | None = None) -> int:
        """Free what only `holder` holds, or at least `size_bytes` by the usual order if that much can go.

        Pinned segments stay, those being read go when their lease ends. A holder remains: what it holds counts again
        once it is stored again. Returns the bytes freed now. Raises ValueError unless exactly one is given.
        """
        if (holder is None) == (size_bytes is None):
            raise ValueError("expected either a holder or a number of bytes")
        with self.index.transaction() as db:
            self.index.reap_dead_sessions(db)
            if holder is not None:
                chosen = select_copies(db, f"{_ONLY_OF_HOLDER} AND NOT {PINNED}", {"holder": holder})
                self.space.evict(db, chosen, "requested")
            else:
                chosen = self.space.least_needed(db, size_bytes or 0, now=self.clock())
            removable = self.space.removable(db, [copy.id for copy in chosen])
        return self.space.remove(removable)

    def sweep(self) -> int:
        """The chore of every few seconds: end dead leases, remove what expired or was left. Returns the bytes freed."""
        unended = set(self._unended)
        with self.index.transaction() as db:
            self.index.reap_dead_sessions(db)
            self._end_late(db, unended)
            settle_orphans(db, self.blocks)
            now = self.clock()
            expired = select_copies(db, f"state = 'stored' AND NOT {LEASED} AND {EXPIRED}", {"now": now})
            self.space.evict(db, expired, "expired")
            left = select_copies(db, f"{ORPHAN} AND used_at < :before", {"before": now - self._orphan_ttl_s})
            self.space.evict(db, left, "orphaned")
            removable = self.space.removable(db)
        self._unended -= unended
        return self.space.remove(removable)

    @property
    def stored_bytes(self) -> int:
        """Bytes of KV files on disk, with what is reserved for those being written: what the cap limits."""
        with self.index.snapshot() as db:
            return total_bytes(db)

    def lease(self, holder: str | None) -> tuple[str, list[Copy]]:
        """Protect what `holder` holds (None: everything stored) from removal until `end_lease`."""
        lease = secrets.token_hex(8)
        with self.index.transaction() as db:
            condition = "state = 'stored'" if holder is None else _OF_HOLDER
            copies = select_copies(db, f"{condition} ORDER BY token_start", {"holder": holder})
            lease_copies(db, lease, self.session, copies)
        return lease, copies

    def end_lease(self, lease: str) -> None:
        """Let go; segments whose removal waited for this are removed. Without effect behind `close`.

        Where the disk fails the next `sweep` lets go.
        """
        if self._closed:
            return
        try:
            with self.index.transaction() as db:
                leased = [row[0] for row in db.execute("SELECT copy FROM leases WHERE id = ?", (lease,))]
                db.execute("DELETE FROM leases WHERE id = ?", (lease,))
                removable = self.space.removable(db, leased)
            self.space.remove(removable)
        except OSError as error:
            log.error("kv_store: a lease is ended later: %s", error)
            self._unended.add(lease)

    def end_later(self, ids: Iterable[str]) -> None:
        """A writer of this process could not end its lease and copies: `sweep` ends the one and orphans the others."""
        self._unended.update(ids)

    def have_ended(self, ids: Iterable[str]) -> None:
        """They could be ended after all, and may be taken up again."""
        self._unended.difference_update(ids)

    def condemn(self, copy: Copy, reason: str) -> None:
        """Never serve a damaged copy again; it is removed when its last lease ends."""
        with self.index.transaction() as db:
            doom(db, [copy.id], reason)

    def report_host(self, sizes: Mapping[str, int]) -> set[str]:
        """Record the bytes of each copy in this process's memory. Returns those copies that no longer exist."""
        with self.index.transaction() as db:
            among = "state = 'stored' AND id IN (SELECT value FROM json_each(:ids))"
            known = {copy.id for copy in select_copies(db, among, {"ids": json.dumps(list(sizes))})}
            db.execute("DELETE FROM host_residency WHERE session = ?", (self.session,))
            db.executemany(
                "INSERT INTO host_residency (session, copy, size_bytes) VALUES (?, ?, ?)",
                [(self.session, copy, size) for copy, size in sizes.items() if copy in known],
            )
        return set(sizes) - known

    def close(self) -> None:
        """End this process's leases; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with self.index.transaction() as db:
            end_session(db, self.session)
        self.index.close()
        self._session.close()

    def _end_late(self, db: sqlite3.Connection, unended: set[str]) -> None:
        among = "IN (SELECT value FROM json_each(?))"
        ids = json.dumps(sorted(unended))
        db.execute(f"DELETE FROM leases WHERE id {among}", (ids,))
        db.execute(
            f"UPDATE copies SET session = NULL WHERE state = 'writing' AND session = ? AND id {among}",
            (self.session, ids),
        )

    def _set_policy(self, db: sqlite3.Connection, holder: str, ttl_s: float | None, pinned: bool) -> None:
        if ttl_s is not None and not ttl_s >= 0:  # also refuses NaN
            raise ValueError(f"got a TTL of {ttl_s} seconds, expected 0 or more, or None")
        db.execute(
            "INSERT OR REPLACE INTO holders (name, ttl_s, pinned, set_at) VALUES (?, ?, ?, ?)",
            (holder, ttl_s, pinned, self.clock()),
        )
