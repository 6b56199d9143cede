"""A writer's share of the index: room reserved, earlier work taken up, and how it ends."""

import json
import logging
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager

from engine.chain import Segment
from engine.errors import KVCorrupt, KVError, StorageFull
from engine.interfaces import KVLayout
from engine.kv_store.catalog import KVCatalog
from engine.kv_store.copies import Copy
from engine.kv_store.index import (
    EXPIRED,
    doom,
    insert_copy,
    lease_copies,
    revive_released,
    select_copies,
    stored_copies,
    touch,
)
from engine.kv_store.layout import same_content, segment_file_bytes
from engine.kv_store.space import ORPHAN
from engine.kv_store.writer import SegmentInWriting

log = logging.getLogger("foreword.kv_store")

_ATTEMPTS = 20  # other processes may take the room that was made before we reserve it


class Reservation:
    """The copies that one writer fills, and the leases on segments of its chain that others stored already."""

    def __init__(self, catalog: KVCatalog, layout: KVLayout, chain: Sequence[Segment], owner: str) -> None:
        """Reserve room for what of `chain` is not stored. Raises StorageFull."""
        self._catalog, self._layout, self._chain, self._owner = catalog, layout, chain, owner
        self._keys = [segment.key for segment in chain]
        self._lease = secrets.token_hex(8)
        self._adopted: list[Copy] = []
        self._copies: dict[str, Copy] = {}
        for _ in range(_ATTEMPTS):
            copies, victims = self._try_reserve()
            self._copies = copies or {}
            with self._ended_later_if_it_fails():
                catalog.space.remove(victims)
            if copies is not None:
                return
        with catalog.index.snapshot() as db:
            raise StorageFull(sum(map(self._full_bytes, chain)), max(0, catalog.space.room(db)))

    def segments(self, executor: Executor) -> list[SegmentInWriting]:
        """The writer's segments, with what an earlier attempt of the same owner published, checked."""
        published = dict(
            zip((copy.id for copy in self._adopted), executor.map(self._take_up, self._adopted), strict=True)
        )
        num_groups = self._layout.num_groups
        result = []
        for segment in self._chain:
            copy = self._copies.get(segment.key)
            groups = num_groups if copy is None else published.get(copy.id, 0)
            result.append(SegmentInWriting(segment.num_tokens, copy, groups))
        if self._adopted:
            self.published(result)
            self._catalog.counters.add("resumed_bytes", amount=sum(segment.written_bytes for segment in result))
        return result

    # --- engine.kv_store.writer.WriterEnd ---

    def published(self, segments: Sequence[SegmentInWriting]) -> None:
        now = self._catalog.clock()
        with self._catalog.index.transaction() as db:
            db.executemany(
                "UPDATE copies SET written_bytes = ?, used_at = ? WHERE id = ? AND session = ?",
                [(item.written_bytes, now, item.copy.id, self._catalog.session) for item in segments if item.copy],
            )

    def commit(self, segments: Sequence[SegmentInWriting]) -> None:
        """Raises KVError if the reservation was taken away (this process was believed dead)."""
        catalog = self._catalog
        with self._ended_later_if_it_fails():
            with catalog.index.transaction() as db:
                now = catalog.clock()
                self._make_way(db, now)
                taken = stored_copies(db, self._keys, now)
                duplicates = []
                for item in segments:
                    if item.copy is None:
                        continue
                    if item.copy.key in taken:
                        duplicates.append(item.copy)
                        continue
                    changed = db.execute(
                        "UPDATE copies SET state = 'stored', owner = NULL, session = NULL"
                        " WHERE id = ? AND state = 'writing' AND session = ?",
                        (item.copy.id, catalog.session),
                    )
                    if changed.rowcount != 1:
                        raise KVError(
                            f"the room of segment {item.copy.key[:12]} was given to others, nothing is stored"
                        )
                doom(db, [copy.id for copy in duplicates], "duplicate")
                revive_released(db, self._keys)
                touch(db, self._keys, now)
            if duplicates:
                catalog.counters.add("duplicate_segments", amount=len(duplicates))
            catalog.end_lease(self._lease)
            catalog.space.remove(duplicates)

    def suspend(self, segments: Sequence[SegmentInWriting]) -> None:
        catalog = self._catalog
        with self._ended_later_if_it_fails():
            with catalog.index.transaction() as db:
                mine = {copy.id for copy in self._mine(db)}
                kept = [item for item in segments if item.copy and item.copy.id in mine and item.groups]
                db.executemany(
                    "UPDATE copies SET session = NULL, size_bytes = ?, written_bytes = ? WHERE id = ?",
                    [(item.written_bytes, item.written_bytes, item.copy.id) for item in kept if item.copy],
                )
                doom(db, mine - {item.copy.id for item in kept if item.copy}, "unwritten")
                removable = catalog.space.removable(db, sorted(mine))
            catalog.end_lease(self._lease)
            catalog.space.remove(removable)

    def abort(self, segments: Sequence[SegmentInWriting]) -> None:
        catalog = self._catalog
        with self._ended_later_if_it_fails():
            with catalog.index.transaction() as db:
                mine = self._mine(db)
                doom(db, [copy.id for copy in mine], "aborted")
            catalog.end_lease(self._lease)
            catalog.space.remove(mine)

    # --- parts ---

    @contextmanager
    def _ended_later_if_it_fails(self) -> Iterator[None]:
        copy_ids = [copy.id for copy in self._copies.values()]
        try:
            yield
        except OSError:
            self._catalog.end_later([self._lease, *copy_ids])
            raise
        self._catalog.have_ended(copy_ids)

    def _try_reserve(self) -> tuple[dict[str, Copy] | None, list[Copy]]:
        """The reserved copies by key (None: room has to be made first), and copies to remove."""
        catalog = self._catalog
        with catalog.index.transaction() as db:
            now = catalog.clock()
            catalog.index.reap_dead_sessions(db)
            self._make_way(db, now)
            stored = stored_copies(db, self._keys, now)
            adopted, abandoned = self._earlier_work(db, stored)
            copies = {copy.key: copy for copy in adopted}
            fresh = [self._new_copy(item) for item in self._chain if item.key not in stored and item.key not in copies]
            needed = sum(copy.size_bytes for copy in fresh)
            needed += sum(copy.full_bytes - copy.size_bytes for copy in adopted)
            spare = [copy.id for copy in (*stored.values(), *adopted)]
            victims = catalog.space.make_room(db, needed, spare=spare, now=now)
            doom(db, [copy.id for copy in abandoned], "abandoned")
            if victims:
                return None, [*victims, *abandoned]
            for copy in fresh:
                insert_copy(db, copy, self._owner, catalog.session, now)
            db.executemany(
                "UPDATE copies SET session = ?, size_bytes = ? WHERE id = ?",
                [(catalog.session, copy.full_bytes, copy.id) for copy in adopted],
            )
            lease_copies(db, self._lease, catalog.session, stored.values())
        self._adopted = adopted
        return copies | {copy.key: copy for copy in fresh}, abandoned

    def _earlier_work(self, db: sqlite3.Connection, stored: dict[str, Copy]) -> tuple[list[Copy], list[Copy]]:
        """What this owner left behind: copies to go on with, and copies that are of no use any more."""
        wanted = {segment.key: segment for segment in self._chain if segment.key not in stored}
        adopted, abandoned = [], []
        for copy in select_copies(db, f"{ORPHAN} AND owner = :owner", {"owner": self._owner}):
            if copy.key in wanted and copy.layout == self._layout:
                adopted.append(copy)
                del wanted[copy.key]
            else:
                abandoned.append(copy)
        return adopted, abandoned

    def _take_up(self, copy: Copy) -> int:
        """Number of leading groups of an adopted copy that are sound; the rest is removed."""
        blocks, sound = self._catalog.blocks, 0
        for block in copy.blocks:
            try:
                blocks.check(copy, block.group)
            except FileNotFoundError:
                break
            except (KVCorrupt, OSError) as error:
                log.error("kv_store: group %d of segment %s is not taken up: %s", block.group, copy.key[:12], error)
                self._catalog.counters.add("checksum_failures" if isinstance(error, KVCorrupt) else "read_errors")
                break
            sound += 1
        blocks.remove(copy, range(sound, copy.layout.num_groups))
        return sound

    def _make_way(self, db: sqlite3.Connection, now: float) -> None:
        """Evict segments of the chain that are still there but no longer served: new ones need their keys."""
        of_chain = "state = 'stored' AND key IN (SELECT value FROM json_each(:keys))"
        parameters: dict[str, object] = {"keys": json.dumps(self._keys), "now": now}
        expired = select_copies(db, f"{of_chain} AND {EXPIRED}", parameters)
        self._catalog.space.evict(db, expired, "expired")
        unreadable = [c for c in select_copies(db, of_chain, parameters) if not same_content(c.layout, self._layout)]
        self._catalog.space.evict(db, unreadable, "layout")

    def _mine(self, db: sqlite3.Connection) -> list[Copy]:
        """This writer's copies that nobody else has taken up meanwhile."""
        among = "id IN (SELECT value FROM json_each(:ids))"
        condition = f"{among} AND state = 'writing' AND (session = :session OR session IS NULL)"
        ids = json.dumps([copy.id for copy in self._copies.values()])
        return select_copies(db, condition, {"ids": ids, "session": self._catalog.session})

    def _new_copy(self, segment: Segment) -> Copy:
        size_bytes = self._full_bytes(segment)
        return Copy(secrets.token_hex(8), segment.key, segment.start, segment.end, self._layout, size_bytes)

    def _full_bytes(self, segment: Segment) -> int:
        return segment_file_bytes(self._layout, segment.num_tokens)
