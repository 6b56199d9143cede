"""What a store does when it opens a folder: put files and index in step again, after whatever happened before."""

import logging
import sqlite3
from collections import defaultdict

from engine.kv_store.blocks import BlockFolder
from engine.kv_store.copies import Copy
from engine.kv_store.counters import Counters
from engine.kv_store.index import Index, doom, select_copies
from engine.kv_store.space import ORPHAN, DiskSpace

log = logging.getLogger("foreword.kv_store")


def recover(index: Index, blocks: BlockFolder, space: DiskSpace, counters: Counters) -> None:
    """End the leases of dead processes, find what has lost files, remove files without meaning.

    Other processes may be at work on the folder. Only names and sizes are looked at: contents are checked when read.
    """
    with index.transaction() as db:
        index.reap_dead_sessions(db)
        # Rows before files: what is stored here had all its files when the folder is listed below.
        stored = select_copies(db, "state = 'stored'", {})
    sizes: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    files = list(blocks.scan())
    for file in files:
        if file.copy is not None and file.published:
            sizes[file.copy, file.key][file.group] = file.size_bytes
    broken = [copy for copy in stored if not _is_whole(copy, sizes.get((copy.id, copy.key), {}))]
    with index.transaction() as db:
        if broken:
            log.error("kv_store: %d stored segments have lost files, or part of one", len(broken))
            counters.add("read_errors", amount=len(broken))
            doom(db, [copy.id for copy in broken], "incomplete")
        removable = space.removable(db)
        # Files before rows: a file's row exists before the file does.
        states = {(copy, key): state for copy, key, state in db.execute("SELECT id, key, state FROM copies")}
    space.remove(removable)
    for file in files:
        state = None if file.copy is None else states.get((file.copy, file.key))
        # Unpublished files of a copy in writing are its writer's, or `settle_orphans`'s.
        if state is None or (not file.published and state != "writing"):
            log.info("kv_store: removing %s: nobody's", file.path.name)
            file.path.unlink(missing_ok=True)


def settle_orphans(db: sqlite3.Connection, blocks: BlockFolder) -> None:
    """Remove what orphaned copies left unfinished, and count only what they still have.

    Inside the transaction, so that nobody takes up a copy meanwhile.
    """
    for copy in select_copies(db, f"{ORPHAN} AND size_bytes != written_bytes", {}):
        for group in range(copy.layout.num_groups):
            blocks.remove_unpublished(copy, group)
        kept = blocks.published_bytes(copy)
        if kept:
            db.execute("UPDATE copies SET size_bytes = ?, written_bytes = ? WHERE id = ?", (kept, kept, copy.id))
        else:
            doom(db, [copy.id], "orphaned")


def _is_whole(copy: Copy, sizes: dict[int, int]) -> bool:
    return all(sizes.get(block.group) == block.size_bytes for block in copy.blocks)
