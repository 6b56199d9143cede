"""One machine's store with tiers behind it that other machines see too: host memory → disk → shared.

What is stored here is copied to the shared tiers behind the caller's back; what only they have is read from there,
where that is predicted to be faster than computing it again, and copied here. A shared tier may fail, forget or lie:
it is then left alone for a while, what it serves is checked, and the KV is computed.
"""

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from engine.chain import Segment
from engine.errors import KVError, KVMissing, StorageFull
from engine.interfaces import KVReader, KVStore, KVWriter
from engine.kv_store.costs import Costs
from engine.kv_store.store import LocalKVStore

log = logging.getLogger("foreword.kv_store")

T = TypeVar("T")

LEFT_ALONE_S = 10.0  # a tier that failed
SWEEP_S = 60.0  # between two sweeps of the shared tiers
MOST_COPIES_WAITING = 64
MOST_TOO_SLOW = 1000


class HeldStore(KVStore, Protocol):
    """A `KVStore` that can say who holds what: name, TTL in seconds and pin."""

    def holders_of(self, keys: Sequence[str]) -> list[tuple[str, float | None, bool]]: ...


class SharedStore(HeldStore, Protocol):
    """A store that several machines see. Its calls raise OSError where it can't be reached."""

    def sweep(self) -> int: ...

    def close(self) -> None: ...


@dataclass
class SharedTier:
    """`name` is for logs and metrics."""

    name: Literal["redis", "directory"]
    store: SharedStore
    left_alone_until: float = field(default=0.0)


class TieredKVStore:
    """A `KVStore` over a `LocalKVStore` and shared tiers, tried in order.

    `pending_folder` remembers holders whose release a shared tier has not heard of yet.
    """

    def __init__(
        self,
        local: LocalKVStore,
        shared: Sequence[SharedTier],
        pending_folder: Path,
        *,
        costs: Costs | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.local, self.shared, self.costs = local, list(shared), costs or Costs()
        self.layout, self.catalog, self.counters = local.layout, local.catalog, local.counters
        self._monotonic = monotonic
        self._pending_folder = pending_folder
        pending_folder.mkdir(parents=True, exist_ok=True)
        self._too_slow: set[str] = set()  # last keys of chains that are computed although a shared tier has more
        self._swept_at = monotonic()
        self._policies_told_at = local.catalog.clock()
        self._closing = threading.Event()
        self._copies: queue.Queue[_CopyJob | None] = queue.Queue(MOST_COPIES_WAITING)
        self._copier = threading.Thread(target=self._run_copies, name="kv-copy", daemon=True)
        self._copier.start()

    # --- engine.interfaces.KVStore ---

    def match(self, chain: Sequence[Segment]) -> int:
        """Leading segments that are stored here, or in a shared tier that is worth loading them from."""
        count = 0
        for run in self._runs(chain):
            if run.tier is not None and not self._worth_loading(run.tier, run.segments):
                self._computed_instead(chain)
                break
            count += len(run.segments)
        else:
            self._too_slow.discard(chain[-1].key if chain else "")
        return count

    def open_reader(self, chain: Sequence[Segment]) -> KVReader:
        runs = self._runs(chain)
        if sum(len(run.segments) for run in runs) < len(chain) or all(run.tier is None for run in runs):
            return self.local.open_reader(chain)  # says what is missing, and counts it
        parts: list[_Part] = []
        try:
            for run in runs:
                parts.append(_Part(run, self._open_run(run)))
        except BaseException:
            for part in parts:
                part.reader.close()
            raise
        return _TieredReader(self, chain, parts)

    def open_writer(self, chain: Sequence[Segment], *, first: int, owner: str) -> KVWriter:
        writer = self.local.open_writer(chain, first=first, owner=owner)
        if chain and chain[-1].key in self._too_slow:
            self._too_slow.discard(chain[-1].key)
            self.counters.add("decisions", "shared_too_slow")
        return _TieredWriter(self, writer, chain, first)

    def attach(self, chain: Sequence[Segment], holder: str, *, ttl_s: float | None, pinned: bool) -> None:
        self.local.attach(chain, holder, ttl_s=ttl_s, pinned=pinned)
        self._forget_release(holder)
        for tier in self.shared:
            self._ask(tier, lambda store: store.attach(chain, holder, ttl_s=ttl_s, pinned=pinned), None)

    def set_policy(self, holder: str, *, ttl_s: float | None, pinned: bool) -> None:
        self.local.set_policy(holder, ttl_s=ttl_s, pinned=pinned)
        for tier in self.shared:
            self._tell_policy(tier, holder, ttl_s, pinned)

    def release(self, holder: str) -> int:
        """Bytes freed here; shared tiers that can't be reached hear of it with a later `sweep`."""
        self._note_release(holder)  # before anything goes, so that a crash forgets none
        freed = self.local.release(holder)
        if self._release_shared(holder):
            self._forget_release(holder)
        return freed

    # --- chores ---

    def unfinished(self) -> set[str]:
        return self.local.unfinished()

    def discard(self, owner: str) -> int:
        return self.local.discard(owner)

    def sweep(self) -> int:
        freed = self.local.sweep()
        if self._monotonic() - self._swept_at >= SWEEP_S:
            self._swept_at = self._monotonic()
            self.sweep_shared()
        return freed

    def sweep_shared(self) -> None:
        """What shared tiers have not heard of yet, and their own chores."""
        told_at, self._policies_told_at = self._policies_told_at, self.catalog.clock()
        for holder, ttl_s, pinned in self.catalog.policies_since(told_at):  # the API's process changes them here only
            for tier in self.shared:
                self._tell_policy(tier, holder, ttl_s, pinned)
        for note in sorted(self._pending_folder.iterdir()):
            if self._release_shared(note.read_text("utf-8")):
                note.unlink(missing_ok=True)
        for tier in self.shared:
            self._ask(tier, lambda store: store.sweep(), 0)

    @property
    def stored_bytes(self) -> int:
        """On this machine."""
        return self.local.stored_bytes

    def drain(self) -> None:
        """Wait for the copies that were asked for."""
        self._copies.join()

    def close(self) -> None:
        """What waits to be copied, and what is being copied, is dropped; safe to call twice."""
        if not self._closing.is_set():
            self._closing.set()
            self._copies.put(None)
            self._copier.join()
            for tier in self.shared:
                with suppress(OSError):
                    tier.store.close()
        self.local.close()

    # --- for readers and writers ---

    def copy_to_shared(self, chain: Sequence[Segment]) -> None:
        """Behind the caller's back; dropped where too much waits."""
        for tier in self.shared:
            self._copy_later(_CopyJob(chain, self.local, tier.store, tier))

    def copy_here(self, chain: Sequence[Segment], tier: SharedTier) -> None:
        self._copy_later(_CopyJob(chain, tier.store, self.local, tier))

    def failed(self, tier: SharedTier, error: Exception) -> None:
        """Leave `tier` alone for a while."""
        log.warning("kv_store: the shared tier %s failed: %s", tier.name, error)
        self.counters.add("shared_errors", tier.name)
        tier.left_alone_until = self._monotonic() + LEFT_ALONE_S

    # --- parts ---

    def _ask(self, tier: SharedTier, call: Callable[[SharedStore], T], otherwise: T) -> T:
        """What `call` returns, or `otherwise` where the tier fails or has just done so."""
        if self._monotonic() < tier.left_alone_until:
            return otherwise
        try:
            return call(tier.store)
        except (OSError, KVError) as error:
            self.failed(tier, error)
            return otherwise

    def _runs(self, chain: Sequence[Segment]) -> list["_Run"]:
        """The leading segments that are stored somewhere, in runs of one tier each; what is here is taken from here."""
        runs, at = [], 0
        while at < len(chain):
            rest = chain[at:]
            tier, count = None, self.local.match(rest)
            if not count:
                tier, count = self._most_shared(rest)
            if not count:
                break
            runs.append(_Run(tier, rest[:count]))
            at += count
        return runs

    def _most_shared(self, chain: Sequence[Segment]) -> tuple[SharedTier | None, int]:
        """The tier that has the most leading segments, and how many."""
        best, most = None, 0
        for tier in self.shared:
            count = self._ask(tier, lambda store: store.match(chain), 0)
            if count > most:
                best, most = tier, count
        return best, most

    def _open_run(self, run: "_Run") -> KVReader:
        """Raises KVMissing, also where the shared tier fails."""
        if run.tier is None:
            return self.local.open_reader(run.segments)
        try:
            return run.tier.store.open_reader(run.segments)
        except OSError as error:
            self.failed(run.tier, error)
            raise KVMissing(f"the shared tier {run.tier.name} failed: {error}") from error

    def _tell_policy(self, tier: SharedTier, holder: str, ttl_s: float | None, pinned: bool) -> None:
        self._ask(tier, lambda store: store.set_policy(holder, ttl_s=ttl_s, pinned=pinned), None)

    def _computed_instead(self, chain: Sequence[Segment]) -> None:
        if len(self._too_slow) >= MOST_TOO_SLOW:  # of prefixes that were asked about and never computed
            self._too_slow.clear()
        self._too_slow.add(chain[-1].key)

    def _worth_loading(self, tier: SharedTier, segments: Sequence[Segment]) -> bool:
        num_tokens = sum(segment.num_tokens for segment in segments)
        size_bytes = sum(self.layout.num_layers * self.layout.layer_bytes(each.num_tokens) for each in segments)
        return self.costs.worth_loading(tier.name, size_bytes, num_tokens)

    # Releases that a shared tier must still hear of: one file a holder, its name in it.

    def _note(self, holder: str) -> Path:
        return self._pending_folder / hashlib.sha256(holder.encode()).hexdigest()

    def _note_release(self, holder: str) -> None:
        try:
            self._note(holder).write_text(holder, "utf-8")
        except OSError as error:  # a full disk must not keep KV from being released
            log.error("kv_store: the release of %s is not noted: %s", holder, error)

    def _forget_release(self, holder: str) -> None:
        self._note(holder).unlink(missing_ok=True)

    def _release_shared(self, holder: str) -> bool:
        """Whether all tiers have heard."""
        answers = [self._ask(tier, lambda store: store.release(holder), None) for tier in self.shared]
        return None not in answers

    # Copies between tiers.

    def _copy_later(self, job: "_CopyJob") -> None:
        try:
            self._copies.put_nowait(job)
        except queue.Full:
            log.warning("kv_store: too much waits to be copied; tokens 0-%d are not", job.chain[-1].end)

    def _run_copies(self) -> None:
        while (job := self._copies.get()) is not None:
            try:
                self._ask(job.tier, lambda _, job=job: _copy_held(job, self._closing), None)  # type: ignore[misc]
            except _Stopped:
                pass
            except Exception:
                log.exception("kv_store: a copy between tiers failed")
            finally:
                self._copies.task_done()


class _Stopped(Exception):
    """The store is closing: a copy is of no use any more."""


@dataclass(frozen=True)
class _Run:
    """Neighbouring segments in one tier (None: here)."""

    tier: SharedTier | None
    segments: Sequence[Segment]


@dataclass(frozen=True)
class _Part:
    run: _Run
    reader: KVReader


@dataclass(frozen=True)
class _CopyJob:
    chain: Sequence[Segment]
    source: HeldStore
    target: HeldStore
    tier: SharedTier  # the shared one of the two


def _copy_held(job: _CopyJob, closing: threading.Event) -> None:
    """Copy segments with those who hold them: they must go with the last of these wherever they are."""
    keys = [segment.key for segment in job.chain]
    holders = job.source.holders_of(keys)
    for holder, ttl_s, pinned in holders:
        job.target.attach(job.chain, holder, ttl_s=ttl_s, pinned=pinned)
    try:
        _copy(job.chain, job.source, job.target, closing)
    except (StorageFull, KVMissing) as error:
        log.info("kv_store: not copied between tiers: %s", error)
    still_held = {name for name, _, _ in job.source.holders_of(keys)}
    for holder, _, _ in holders:
        if holder not in still_held:  # released while this ran
            job.target.release(holder)


def _copy(chain: Sequence[Segment], source: KVStore, target: KVStore, closing: threading.Event) -> None:
    """Store what of `chain` the target lacks and the source has. Raises StorageFull, KVMissing, OSError, KVError."""
    at = 0
    while at < len(chain):
        at += target.match(chain[at:])
        count = source.match(chain[at:])
        if count:
            _copy_run(chain[: at + count], at, source, target, closing)
        at += max(count, 1)


def _copy_run(chain: Sequence[Segment], first: int, source: KVStore, target: KVStore, closing: threading.Event) -> None:
    reader = source.open_reader(chain[first:])
    try:
        writer = target.open_writer(chain, first=first, owner=f"copy {chain[-1].key[:16]}")
        try:
            for layer in range(target.layout.num_layers):
                if closing.is_set():
                    raise _Stopped
                for index, data in enumerate(reader.read_layer(layer)):
                    writer.write_layer(layer, index, data)
            writer.commit()
        except BaseException:
            writer.abort()
            raise
    finally:
        reader.close()


class _TieredReader:
    """Segments from here and from shared tiers, in chain order."""

    def __init__(self, store: TieredKVStore, chain: Sequence[Segment], parts: Sequence[_Part]) -> None:
        self._store, self._chain, self._parts = store, chain, parts
        self._waited_s: dict[str, float] = {}
        self._loaded_bytes: dict[str, int] = {}
        self._read: set[int] = set()
        self._closed = False
        self.tier: Literal["host", "disk", "shared"] = "shared"

    def read_layer(self, layer: int) -> Sequence[memoryview]:
        """Raises KVMissing, also where a shared tier fails; OSError where this machine does."""
        buffers: list[memoryview] = []
        for part in self._parts:
            tier = part.run.tier
            buffers += part.reader.read_layer(layer) if tier is None else self._read_shared(part.reader, tier, layer)
        self._read.add(layer)
        return buffers

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        complete = len(self._read) == self._store.layout.num_layers
        if self._read:
            self._store.counters.add("decisions", "loaded_shared")
        for part in self._parts:
            part.reader.close()
            if part.run.tier is not None and self._read:
                self._store.counters.add("hits", "shared", amount=len(part.run.segments))
                if complete:
                    self._store.copy_here(part.run.segments, part.run.tier)
        for name, size_bytes in self._loaded_bytes.items():
            self._store.costs.loaded(name, size_bytes, self._waited_s[name])

    def _read_shared(self, reader: KVReader, tier: SharedTier, layer: int) -> Sequence[memoryview]:
        started = time.perf_counter()
        try:
            buffers = reader.read_layer(layer)
        except OSError as error:
            self._store.failed(tier, error)
            raise KVMissing(f"the shared tier {tier.name} failed: {error}") from error
        size_bytes = sum(data.nbytes for data in buffers)
        self._waited_s[tier.name] = self._waited_s.get(tier.name, 0.0) + time.perf_counter() - started
        self._loaded_bytes[tier.name] = self._loaded_bytes.get(tier.name, 0) + size_bytes
        self._store.counters.add("read_bytes", "shared", amount=size_bytes)
        return buffers


class _TieredWriter:
    """A local writer that says how long computing took, and has what it stored copied."""

    def __init__(self, store: TieredKVStore, writer: KVWriter, chain: Sequence[Segment], first: int) -> None:
        self._store, self._writer, self._chain, self._first = store, writer, chain, first
        self._started = time.perf_counter()
        self._resumed = writer.groups_done() > 0
        self.write_layer = writer.write_layer
        self.groups_done = writer.groups_done
        self.flush = writer.flush
        self.suspend = writer.suspend
        self.abort = writer.abort

    def commit(self) -> None:
        self._writer.commit()
        if not self._resumed:
            num_tokens = sum(segment.num_tokens for segment in self._chain[self._first :])
            self._store.costs.computed(num_tokens, time.perf_counter() - self._started)
        self._store.copy_to_shared(self._chain)
