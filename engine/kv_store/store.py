"""The KV store of one machine: local disk, and host memory in front of it."""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import WeakValueDictionary

from engine.chain import Segment
from engine.errors import KVMissing
from engine.interfaces import KVLayout, KVReader, KVWriter
from engine.kv_store.blocks import BlockFolder
from engine.kv_store.buffers import BufferPool, Bytes, plain_memory
from engine.kv_store.catalog import Clock, KVCatalog
from engine.kv_store.copies import Copy
from engine.kv_store.counters import Counters
from engine.kv_store.group_file import MAX_SEALED_LAYERS
from engine.kv_store.host_cache import HostCache
from engine.kv_store.index import lease_copies, stored_copies, touch
from engine.kv_store.layout import check_layout, same_content
from engine.kv_store.reader import LocalReader, ReadPath
from engine.kv_store.reservation import Reservation
from engine.kv_store.sealing import Keyring
from engine.kv_store.space import DiskLimits
from engine.kv_store.writer import LocalWriter

MIB = 1024**2


class LocalKVStore:
    """A `KVStore` on a folder of this machine. Any number of processes may open the same folder.

    `host_bytes` caps the host-memory tier, `readahead_bytes` what a reader fetches ahead, `write_buffer_bytes` what
    waits for the disk in a writer, `io_threads` how many requests the disk gets at once. `allocate` gives the memory
    that layers are read into. `write_buffers`: memory in which data waits for the disk, kept from writer to writer;
    without, each writer has its own. `several_machines`: the folder lies on a file system that they share, whose
    locks work between them. `keyring`: what is written is encrypted.
    """

    def __init__(
        self,
        folder: Path,
        layout: KVLayout,
        limits: DiskLimits,
        *,
        host_bytes: int = 0,
        readahead_bytes: int = 64 * MIB,
        write_buffer_bytes: int = 128 * MIB,
        io_threads: int = 4,
        counters: Counters | None = None,
        orphan_ttl_s: float = 6 * 3600.0,
        clock: Clock = time.time,
        allocate: Callable[[int], Bytes] = plain_memory,
        write_buffers: BufferPool | None = None,
        open_blocks: Callable[[Path], BlockFolder] = BlockFolder,
        several_machines: bool = False,
        keyring: Keyring | None = None,
    ) -> None:
        """Raises ValueError for an impossible layout, OSError, KVError."""
        check_layout(layout)
        if keyring is not None and min(layout.layers_per_group, layout.num_layers) > MAX_SEALED_LAYERS:
            raise ValueError(
                f"got {layout.layers_per_group} layers a file, at most {MAX_SEALED_LAYERS} can be encrypted"
            )
        self.layout = layout
        self.catalog = KVCatalog(
            folder,
            limits,
            counters=counters,
            orphan_ttl_s=orphan_ttl_s,
            clock=clock,
            open_blocks=open_blocks,
            several_machines=several_machines,
        )
        self.catalog.blocks.keyring = keyring
        self.counters = self.catalog.counters
        self._io_threads = io_threads
        self._write_buffer_bytes, self._write_buffers = write_buffer_bytes, write_buffers
        self._executor = ThreadPoolExecutor(io_threads, thread_name_prefix="kv-read")
        self._path = ReadPath(
            blocks=self.catalog.blocks,
            host=HostCache(host_bytes, self.counters),
            buffers=BufferPool(readahead_bytes, allocate),
            executor=self._executor,
            counters=self.counters,
            readahead_bytes=readahead_bytes,
        )
        self._writers: WeakValueDictionary[str, LocalWriter] = WeakValueDictionary()  # unfinished ones live on
        self._writers_lock = threading.Lock()
        self.catalog.keep_to_cap()

    def match(self, chain: Sequence[Segment]) -> int:
        with self.catalog.index.snapshot() as db:
            stored = self._stored(stored_copies(db, [segment.key for segment in chain], self.catalog.clock()))
        count = 0
        while count < len(chain) and chain[count].key in stored:
            count += 1
        return count

    def open_reader(self, chain: Sequence[Segment]) -> KVReader:
        lease, catalog = secrets.token_hex(8), self.catalog
        keys = [segment.key for segment in chain]
        with catalog.index.transaction() as db:
            now = catalog.clock()
            stored = self._stored(stored_copies(db, keys, now))
            for segment in chain:
                if segment.key not in stored:
                    catalog.counters.add("misses")
                    raise KVMissing(f"segment {segment.index} (tokens {segment.start}-{segment.end}) is not stored")
            copies = [stored[key] for key in keys]
            lease_copies(db, lease, catalog.session, copies)
            touch(db, keys, now)
        return LocalReader(
            self.layout, copies, self._path, condemn=catalog.condemn, end_lease=lambda: self._end_reading(lease)
        )

    def open_writer(self, chain: Sequence[Segment], *, first: int, owner: str) -> KVWriter:
        if not 0 <= first <= len(chain):
            raise ValueError(f"got first = {first}, expected 0 to {len(chain)}")
        with self._writers_lock:
            earlier = self._writers.pop(owner, None)
        if earlier is not None:  # an attempt of this process that ended without a word
            earlier.suspend()
        reservation = Reservation(self.catalog, self.layout, chain[first:], owner)
        try:
            segments = reservation.segments(self._executor)
        except BaseException:
            reservation.abort([])
            raise
        writer = LocalWriter(
            self.layout,
            segments,
            self.catalog.blocks,
            self.counters,
            reservation,
            buffer_bytes=self._write_buffer_bytes,
            num_threads=self._io_threads,
            buffers=self._write_buffers,
        )
        with self._writers_lock:
            self._writers[owner] = writer
        return writer

    def attach(self, chain: Sequence[Segment], holder: str, *, ttl_s: float | None, pinned: bool) -> None:
        self.catalog.attach(chain, holder, ttl_s=ttl_s, pinned=pinned)

    def set_policy(self, holder: str, *, ttl_s: float | None, pinned: bool) -> None:
        self.catalog.set_policy(holder, ttl_s=ttl_s, pinned=pinned)

    def release(self, holder: str) -> int:
        freed = self.catalog.release(holder)
        self._report_host()
        return freed

    def holders_of(self, keys: Sequence[str]) -> list[tuple[str, float | None, bool]]:
        return self.catalog.holders_of(keys)

    def unfinished(self) -> set[str]:
        return self.catalog.unfinished()

    def discard(self, owner: str) -> int:
        return self.catalog.discard(owner)

    def sweep(self) -> int:
        """The catalog's chores; also forgets host memory of segments that are gone. Returns bytes freed on disk."""
        freed = self.catalog.sweep()
        self._report_host()
        return freed

    @property
    def stored_bytes(self) -> int:
        return self.catalog.stored_bytes

    def close(self) -> None:
        """Suspend writers, end this process's leases; safe to call twice."""
        with self._writers_lock:
            writers = list(self._writers.values())
            self._writers.clear()
        for writer in writers:
            writer.suspend()
        self._executor.shutdown(cancel_futures=True)
        self.catalog.close()

    def _stored(self, copies: dict[str, Copy]) -> dict[str, Copy]:
        """Those this store can read. Keys cover the engine's digest, so another layout should never turn up."""
        return {key: copy for key, copy in copies.items() if same_content(copy.layout, self.layout)}

    def _end_reading(self, lease: str) -> None:
        self.catalog.end_lease(lease)
        self._report_host()

    def _report_host(self) -> None:
        """Tell the index what lies in this process's memory, and forget what the index has forgotten."""
        host = self._path.host
        sizes = host.bytes_by_copy()
        ids = {name: name.partition("-")[0] for name in sizes}
        gone = self.catalog.report_host({ids[name]: size for name, size in sizes.items()})
        host.drop({name for name in sizes if ids[name] in gone})
