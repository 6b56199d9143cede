"""Room on disk: found in the index before a byte is written, made by removing what is needed least."""

import json
import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import StorageFull
from engine.kv_store.blocks import BlockFolder
from engine.kv_store.copies import Copy
from engine.kv_store.counters import Counters
from engine.kv_store.index import EXPIRED, LEASED, PINNED, Index, doom, select_copies, total_bytes

log = logging.getLogger("foreword.kv_store")

ORPHAN = "state = 'writing' AND session IS NULL"
REMOVABLE = f"state = 'doomed' AND NOT {LEASED}"
UNUSED = f"state = 'stored' AND NOT {LEASED} AND NOT {PINNED}"


@dataclass(frozen=True)
class DiskLimits:
    """What the disk tier may take, in bytes."""

    cap_bytes: int  # all KV files together
    floor_bytes: int = 0  # free space of the file system that is never used


class DiskSpace:
    """Decides which copies go, and removes them."""

    def __init__(self, index: Index, blocks: BlockFolder, limits: DiskLimits, counters: Counters) -> None:
        self._index, self._blocks, self._counters = index, blocks, counters
        self.limits = limits

    def room(self, db: sqlite3.Connection) -> int:
        """Bytes that may be reserved now: under the cap and above the floor. Negative where a limit was lowered."""
        still_to_write = db.execute(
            "SELECT COALESCE(SUM(size_bytes - written_bytes), 0) FROM copies WHERE state = 'writing'"
        ).fetchone()[0]
        above_floor = self._blocks.free_bytes() - self.limits.floor_bytes - still_to_write
        return int(min(self.limits.cap_bytes - total_bytes(db), above_floor))

    def make_room(self, db: sqlite3.Connection, needed: int, *, spare: Sequence[str], now: float) -> list[Copy]:
        """Choose and doom the copies that must go so that `needed` bytes fit; none if they fit already.

        Nothing in `spare` (copy ids) goes. Raises StorageFull if all that may go is not enough.
        """
        room = self.room(db)
        if needed <= room:
            return []
        victims = self.least_needed(db, needed - room, spare=spare, now=now)
        room += sum(copy.size_bytes for copy in victims)
        if needed > room:
            raise StorageFull(needed, max(0, room))
        return victims

    def least_needed(
        self, db: sqlite3.Connection, size_bytes: int, *, now: float, spare: Sequence[str] = ()
    ) -> list[Copy]:
        """Doom copies of at least `size_bytes`, or as much as may go.

        Work that nobody takes up goes first, then what has expired, then the least recently used (of one chain its
        end first). Nothing leased or pinned goes.
        """
        chosen: list[Copy] = []
        for condition, order, reason in (
            (REMOVABLE, "used_at", ""),
            (ORPHAN, "used_at", "orphaned"),
            (f"{UNUSED} AND {EXPIRED}", "used_at", "expired"),
            (f"{UNUSED} AND NOT {EXPIRED}", "used_at, token_start DESC", "capacity"),
        ):
            spared = "id NOT IN (SELECT value FROM json_each(:spare))"
            parameters: dict[str, object] = {"spare": json.dumps(list(spare)), "now": now}
            candidates = select_copies(db, f"{condition} AND {spared} ORDER BY {order}", parameters)
            enough = []
            while candidates and size_bytes > 0:
                enough.append(candidates.pop(0))
                size_bytes -= enough[-1].size_bytes
            if reason:
                self.evict(db, enough, reason)
            chosen += enough
        return chosen

    def evict(self, db: sqlite3.Connection, copies: Sequence[Copy], reason: str) -> None:
        """Doom `copies` and count them as evicted."""
        if copies:
            doom(db, [copy.id for copy in copies], reason)
            self._counters.add("evictions", "disk", reason, amount=len(copies))
            total = sum(copy.size_bytes for copy in copies)
            log.info("kv_store: evicting %d segments (%d bytes): %s", len(copies), total, reason)

    def remove(self, copies: Sequence[Copy]) -> int:
        """Remove doomed, unleased copies: files first, then rows. Returns the bytes freed."""
        gone = []
        for copy in copies:
            try:
                self._blocks.remove(copy)
            except OSError as error:  # the row stays and its bytes go on counting, so the cap holds
                log.error("kv_store: cannot remove segment %s: %s", copy.key[:12], error)
                self._counters.add("write_errors")
            else:
                gone.append(copy)
        if gone:
            with self._index.transaction() as db:
                db.executemany("DELETE FROM copies WHERE id = ? AND state = 'doomed'", [(copy.id,) for copy in gone])
        return sum(copy.size_bytes for copy in gone)

    def removable(self, db: sqlite3.Connection, copy_ids: Sequence[str] | None = None) -> list[Copy]:
        """Doomed copies (among `copy_ids`, or all) that nobody leases any more."""
        if copy_ids is None:
            return select_copies(db, REMOVABLE, {})
        among = "id IN (SELECT value FROM json_each(:ids))"
        return select_copies(db, f"{REMOVABLE} AND {among}", {"ids": json.dumps(list(copy_ids))})
