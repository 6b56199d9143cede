"""The store under test, its documents, and the book of what faults did to it."""

import random
import sqlite3
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from engine.chain import Segment
from engine.errors import KVMissing, StorageFull
from engine.interfaces import KVLayout
from engine.kv_store import Counters, DiskLimits, LocalKVStore
from engine.kv_store.layout import segment_file_bytes
from loadtests.kv_documents import chain_of, read, write
from loadtests.kv_faults.shim import Shim

LAYOUT = KVLayout(num_layers=5, bytes_per_token=2, layers_per_group=2)  # three files a segment, the last one half empty
DOCUMENTS = [
    chain_of((1 + number % 4) * 4096 - 1000 * (number % 3), seed=number, shared_tokens=4096 * (number % 2))
    for number in range(12)
]
CAP_BYTES = 16 * segment_file_bytes(
    LAYOUT, 4096
)  # about half of what the documents need: eviction goes on all the time
HOST_BYTES = 64 * 1024
REFUSALS = (StorageFull, KVMissing, OSError)  # what callers must expect; anything else is a crash
COUNTS_OF_FAULTS = (
    "checksum_failures", "read_errors", "write_errors", "index_errors", "duplicate_segments", "dead_sessions",
)  # fmt: skip


@dataclass
class Book:
    injected: Counter[str] = field(default_factory=Counter)
    noticed: Counter[str] = field(default_factory=Counter)  # by the store's own counters
    refused: Counter[str] = field(default_factory=Counter)  # a call ended with a clean error
    wrong_kv: int = 0
    blocks_compared: int = 0
    uncounted: list[str] = field(default_factory=list)  # harm that no counter of the store shows
    unsound: list[str] = field(default_factory=list)  # files and index apart, a lease leaked, the cap overrun
    crashes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.wrong_kv or self.uncounted or self.unsound or self.crashes)

    def add(self, other: "Book") -> None:
        for mine, theirs in ((self.injected, other.injected), (self.noticed, other.noticed)):
            mine.update(theirs)
        self.refused.update(other.refused)
        self.wrong_kv += other.wrong_kv
        self.blocks_compared += other.blocks_compared
        self.uncounted += other.uncounted
        self.unsound += other.unsound
        self.crashes += other.crashes


class Bench:
    def __init__(self, folder: Path, shim: Shim, rng: random.Random, book: Book) -> None:
        self.folder, self.shim, self.rng, self.book = folder, shim, rng, book
        self.counters = Counters()
        self.open()

    def open(self) -> None:
        host_bytes = self.rng.choice([0, 0, 0, HOST_BYTES])
        limits = DiskLimits(CAP_BYTES)
        self.store = LocalKVStore(self.folder, LAYOUT, limits, host_bytes=host_bytes, counters=self.counters)

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def document(self) -> list[Segment]:
        return self.rng.choice(DOCUMENTS)

    def stored_document(self) -> list[Segment]:
        """One that is stored from end to end."""
        links = self.document()
        write(self.store, links, owner="bench")
        return links

    def absent_document(self, *, beside: list[Segment] | None = None) -> list[Segment]:
        """One of which nothing is stored any more; it shares nothing with `beside`."""
        kept = {link.key for link in beside or []}
        links = self.rng.choice([links for links in DOCUMENTS if links[0].key not in kept])
        self.store.attach(links, "absent", ttl_s=None, pinned=False)
        self.store.release("absent")
        return links

    def files_of(self, links: list[Segment]) -> list[Path]:
        """The published files of `links`, in order."""
        return [file for link in links for file in sorted((self.folder / "blocks").glob(f"{link.key}-*.kv"))]

    @contextmanager
    def fault(
        self, kind: str, links: list[Segment], *, always: bool = False, reopen: bool = False
    ) -> Iterator[Callable[..., None]]:
        """The block injects one fault and calls what it yields once the fault is in place; the shim's are seen to be.

        A fault that wasn't placed doesn't count. Behind it `links` are read, mended, and read again. Where it did harm
        (`always`: in any case), a counter of the store must show it. `reopen`: only opening the folder anew cleans up.
        """
        before, placed, refused, note = self._noticed(), 0, False, ""

        def place(how: str = "") -> None:
            nonlocal placed, note
            placed += 1
            note = how

        try:
            yield place
        except REFUSALS as error:
            refused, note = True, f"{note} {error!r}"
        except Exception:
            self._crashed(kind)
        finally:
            placed += self.shim.disarm()
        if not placed:
            return
        self.book.injected[kind] += 1
        self.book.refused[kind] += refused
        try:
            lost = self.read(kind, links) < len(links)
            noticed = self._noticed() > before
            self.book.noticed[kind] += noticed
            if (lost or refused or always) and not noticed:
                trouble = f"{kind} {note}: {len(links)} segments, refused {refused}, lost {lost}"
                self.book.uncounted.append(trouble)
            if reopen:
                self.reopen()
            self._mend(kind, links)
        except Exception:
            self._crashed(kind)

    def read(self, kind: str, links: list[Segment]) -> int:
        served = read(self.store, links)
        self.book.blocks_compared += served.blocks
        self.book.wrong_kv += served.wrong
        if served.wrong:
            print(f"WRONG KV behind {kind}: {served}", flush=True)
        return served.segments

    def _mend(self, kind: str, links: list[Segment]) -> None:
        self.store.sweep()
        for _ in range(len(links) + 1):  # damage behind the first that was found is found by the next reader
            write(self.store, links, owner="bench")
            if self.read(kind, links) == len(links):
                break
        else:
            self.book.unsound.append(f"{kind}: a document written again is not served")
        self.check(kind)

    def check(self, kind: str) -> None:
        """Nobody else is at work: files, index, cap and leases agree."""
        on_disk = sum(path.stat().st_size for path in (self.folder / "blocks").iterdir())
        counted = self.store.stored_bytes
        if not on_disk <= counted <= CAP_BYTES:
            self.book.unsound.append(f"{kind}: {on_disk} bytes on disk, {counted} counted, cap {CAP_BYTES}")
        with self.store.catalog.index.snapshot() as db:
            (leases,) = db.execute("SELECT COUNT(*) FROM leases").fetchone()
            (writing,) = db.execute("SELECT COUNT(*) FROM copies WHERE session IS NOT NULL").fetchone()
        if leases or writing:
            self.book.unsound.append(f"{kind}: {leases} leases and {writing} reservations are left")

    def _noticed(self) -> int:
        return sum(self.counters.get(name) for name in COUNTS_OF_FAULTS)

    def _crashed(self, kind: str) -> None:
        self.book.crashes.append(f"{kind}: {traceback.format_exc()}")
        with suppress(sqlite3.Error, OSError):
            self.store.close()
        self.open()
