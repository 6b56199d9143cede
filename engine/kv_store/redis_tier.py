"""A tier in Redis, for documents small enough that fetching them beats computing them again.

A layer of a segment is split into parts of at most `PART_BYTES`; the segment's headers, the same as in its files on a
disk, hold a checksum of each layer and are checked with it. Everything is written before the one script that makes it
matchable, so a Redis that is killed has all of a segment or does not know it. What is read is checked; what is damaged
or gone is a miss.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal, TypeVar

from engine.chain import Segment
from engine.errors import KVCorrupt, KVError, KVMissing, KVSealed, StorageFull
from engine.interfaces import KVLayout, KVReader, KVWriter
from engine.kv_store.counters import Counters
from engine.kv_store.group_file import MAX_SEALED_LAYERS, GroupFile, Header
from engine.kv_store.layout import ALIGNMENT, segment_file_bytes
from engine.kv_store.sealing import Keyring, Seal

T = TypeVar("T")

PREFIX = "{foreword-kv}:"
PART_BYTES = 1024**2
WRITER_LIFE_S = 600.0  # a writer silent for so long is taken for dead, and its room given back
TIMEOUT_S = 5.0


class RedisKVStore:
    """A `KVStore` in a Redis that any number of machines share.

    `cap_bytes` limits what lies in it, by the sizes of the same segments on a disk; `max_document_bytes` what one
    writer may bring. It keeps no unfinished work: a writer that is suspended is aborted. Every call but `close` raises
    OSError where Redis fails.
    """

    def __init__(
        self,
        url: str,
        layout: KVLayout,
        *,
        cap_bytes: int,
        max_document_bytes: int = 64 * 1024**2,
        counters: Counters | None = None,
        clock: Callable[[], float] | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        """Does not connect yet. Raises ValueError for a URL of another kind."""
        import redis

        self.layout, self.counters = layout, counters or Counters()
        self._cap_bytes, self._max_document_bytes, self._clock = cap_bytes, max_document_bytes, clock
        self.keyring = keyring
        self._redis_error = redis.RedisError
        timeouts = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
        self._client: Any = redis.Redis.from_url(url, **timeouts)
        script = files("engine.kv_store").joinpath("redis_tier.lua").read_text("utf-8")
        self._script: Any = self._client.register_script(script)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-redis")
        self._unended: dict[str, Sequence[_Stored]] = {}  # writers whose end Redis has not heard of

    def match(self, chain: Sequence[Segment]) -> int:
        return int(self._run("match", keys=_keys(chain))) if chain else 0

    def open_reader(self, chain: Sequence[Segment]) -> KVReader:
        found = self._run("open", keys=_keys(chain)) if chain else b"[]"
        if isinstance(found, int):
            missing = chain[found]
            self.counters.add("misses")
            raise KVMissing(f"segment {missing.index} (tokens {missing.start}-{missing.end}) is not stored")
        copies = [value["copy"] for value in json.loads(found)]
        stored = [_Stored(segment, copy, self.layout) for segment, copy in zip(chain, copies, strict=True)]
        return RedisReader(self, stored)

    def open_writer(self, chain: Sequence[Segment], *, first: int, owner: str) -> KVWriter:
        """Raises StorageFull, also for a document that is too large for this tier; OSError."""
        if not 0 <= first <= len(chain):
            raise ValueError(f"got first = {first}, expected 0 to {len(chain)}")
        document_bytes = sum(segment_file_bytes(self.layout, segment.num_tokens) for segment in chain)
        if document_bytes > self._max_document_bytes:
            raise StorageFull(document_bytes, self._max_document_bytes)
        self._end_late()
        own = [_Stored(segment, secrets.token_hex(8), self.layout) for segment in chain[first:]]
        there = {item.segment.key for item in own if self.match([item.segment])}
        fresh = [item for item in own if item.segment.key not in there]
        writer = secrets.token_hex(8)
        done, detail = self._run(
            "reserve",
            writer=writer,
            copies=[item.as_json() for item in fresh],
            size=sum(item.size_bytes for item in fresh),
            cap=self._cap_bytes,
            life=WRITER_LIFE_S,
            spare=_keys(chain),
        )
        if not done:
            raise StorageFull(sum(item.size_bytes for item in fresh), int(detail))
        if detail:
            self.counters.add("evictions", "shared", "capacity", amount=int(detail))
        return RedisWriter(self, writer, own, there)

    def attach(self, chain: Sequence[Segment], holder: str, *, ttl_s: float | None, pinned: bool) -> None:
        self._run("attach", keys=_keys(chain), holder=holder, ttl=ttl_s, pinned=pinned)

    def set_policy(self, holder: str, *, ttl_s: float | None, pinned: bool) -> None:
        self._run("set_policy", holder=holder, ttl=ttl_s, pinned=pinned)

    def holders_of(self, keys: Sequence[str]) -> list[tuple[str, float | None, bool]]:
        """Name, TTL in seconds and pin of each holder of any of the segments."""
        found = json.loads(self._run("holders", keys=list(keys)))
        return [(name, policy.get("ttl"), policy["pinned"]) for name, policy in found.items()] if found else []

    def release(self, holder: str) -> int:
        return int(self._run("release", holder=holder))

    def sweep(self) -> int:
        """Remove what expired and what dead writers left. Returns the bytes freed."""
        self._end_late()
        return int(self._run("sweep"))

    @property
    def stored_bytes(self) -> int:
        return int(self._run("total"))

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
        self._client.close()

    # --- for readers and writers ---

    def condemn(self, stored: "_Stored") -> None:
        self._run("condemn", key=stored.segment.key, copy=stored.copy)

    def fetch_ahead(self, load: Callable[[], list[memoryview]]) -> Future[list[memoryview]]:
        return self._executor.submit(load)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        return list(self._guarded(lambda: self._client.mget([PREFIX + name for name in names])))

    def put(self, values: dict[str, bytes]) -> None:
        """Kept for as long as a writer may live; committing keeps them for good."""

        def send() -> None:
            with self._client.pipeline(transaction=False) as pipe:
                for name, value in values.items():
                    pipe.set(PREFIX + name, value, ex=int(2 * WRITER_LIFE_S))
                pipe.execute()

        self._guarded(send)

    def commit(self, writer: str, fresh: Sequence["_Stored"]) -> int:
        """How many segments another had stored meanwhile, -1 where the writer's room was given to others."""
        try:
            return self._end("commit", writer, fresh)
        except OSError:  # it may have been done all the same: then nothing is left to abort
            self._unended[writer] = fresh
            raise

    def abort(self, writer: str, fresh: Sequence["_Stored"]) -> None:
        """Where Redis fails the next writer or sweep does it."""
        try:
            self._end("abort", writer, fresh)
        except OSError:
            self._unended[writer] = fresh

    def _end_late(self) -> None:
        for writer, fresh in list(self._unended.items()):
            self._end("abort", writer, fresh)
            del self._unended[writer]

    def _end(self, operation: Literal["commit", "abort"], writer: str, fresh: Sequence["_Stored"]) -> int:
        return int(self._run(operation, writer=writer, copies=[item.as_json() for item in fresh]))

    def _run(self, operation: str, **arguments: Any) -> Any:
        now = "" if self._clock is None else repr(self._clock())
        given = json.dumps(arguments)
        return self._guarded(lambda: self._script(keys=[PREFIX], args=[operation, now, given]))

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._redis_error as error:
            raise OSError(f"the KV tier in Redis failed: {error}") from error


@dataclass(frozen=True)
class _Stored:
    """One copy of one segment, in parts."""

    segment: Segment
    copy: str
    layout: KVLayout

    @property
    def layer_bytes(self) -> int:
        return self.layout.layer_bytes(self.segment.num_tokens)

    @property
    def parts_per_layer(self) -> int:
        return -(-self.layer_bytes // PART_BYTES)

    @property
    def size_bytes(self) -> int:
        return segment_file_bytes(self.layout, self.segment.num_tokens)

    @property
    def head_name(self) -> str:
        return f"head:{self.copy}"

    def part_names(self, layer: int) -> list[str]:
        first = layer * self.parts_per_layer
        return [f"part:{self.copy}:{first + number}" for number in range(self.parts_per_layer)]

    def as_json(self) -> dict[str, Any]:
        return {
            "key": self.segment.key,
            "copy": self.copy,
            "parts": self.layout.num_layers * self.parts_per_layer,
            "size": self.size_bytes,
            "start": self.segment.start,
        }

    @property
    def blocks(self) -> list[GroupFile]:
        """The fewest headers that hold all layers' checksums."""
        layout = replace(self.layout, layers_per_group=min(self.layout.num_layers, MAX_SEALED_LAYERS))
        segment = self.segment
        return [GroupFile(segment.key, segment.start, segment.end, group, layout) for group in range(layout.num_groups)]

    def block(self, layer: int) -> GroupFile:
        return self.blocks[layer // MAX_SEALED_LAYERS]

    def encode_head(self, entries: Sequence[bytes], seal: Seal | None) -> bytes:
        blocks = self.blocks
        return b"".join(block.encode_header(entries[block.layers.start : block.layers.stop], seal) for block in blocks)

    def decode_head(self, head: bytes) -> list[Header]:
        """One a block. Raises KVCorrupt."""
        headers = [head[at : at + ALIGNMENT] for at in range(0, len(head), ALIGNMENT)]
        if len(headers) != len(self.blocks):
            raise KVCorrupt(f"got {len(headers)} headers, expected {len(self.blocks)}")
        return [block.decode_header(header) for block, header in zip(self.blocks, headers, strict=True)]


class RedisReader:
    """A `KVReader`; the next layer is fetched while the caller computes."""

    def __init__(self, store: RedisKVStore, stored: Sequence[_Stored]) -> None:
        """Raises KVMissing, OSError."""
        self._store, self._stored = store, stored
        self._closed = self._read_any = False
        self._ahead: tuple[int, Future[list[memoryview]]] | None = None
        self.tier: Literal["host", "disk", "shared"] = "shared"
        heads = store.get([item.head_name for item in stored]) if stored else []
        self._headers = [self._checked_head(item, head) for item, head in zip(stored, heads, strict=True)]

    def read_layer(self, layer: int) -> Sequence[memoryview]:
        """Raises KVMissing, OSError."""
        if self._closed:
            raise ValueError("the reader is closed")
        if not 0 <= layer < self._store.layout.num_layers:
            raise ValueError(f"got layer {layer}, expected 0 to {self._store.layout.num_layers - 1}")
        self._read_any = True
        ahead, self._ahead = self._ahead, None
        layers = ahead[1].result() if ahead is not None and ahead[0] == layer else self._fetch(layer)
        if layer + 1 < self._store.layout.num_layers:
            self._ahead = layer + 1, self._store.fetch_ahead(lambda: self._fetch(layer + 1))
        self._store.counters.add("read_bytes", "shared", amount=sum(data.nbytes for data in layers))
        return layers

    def close(self) -> None:
        """Safe to call twice."""
        if not self._closed:
            self._closed = True
            if self._ahead is not None:
                self._ahead[1].cancel()
            if self._read_any:
                self._store.counters.add("hits", "shared", amount=len(self._stored))

    def _fetch(self, layer: int) -> list[memoryview]:
        names = [item.part_names(layer) for item in self._stored]
        parts = iter(self._store.get([name for each in names for name in each]) if names else [])
        return [
            self._checked(item, layer, [next(parts) for _ in each], headers[layer // MAX_SEALED_LAYERS])
            for item, each, headers in zip(self._stored, names, self._headers, strict=True)
        ]

    def _checked(self, item: _Stored, layer: int, parts: Sequence[bytes | None], header: Header) -> memoryview:
        there = [part for part in parts if part is not None]
        if len(there) < len(parts):
            raise self._lost(item, "read_errors", f"parts of layer {layer} are gone")
        data = there[0] if len(there) == 1 else b"".join(there)
        if len(data) != item.layer_bytes:
            raise self._lost(item, "checksum_failures", f"layer {layer} has {len(data)} bytes")
        try:
            opened = item.block(layer).decode_layer(layer, data, header, self._store.keyring)
        except KVSealed as error:
            raise self._lost(item, "key_misses", str(error)) from error
        except KVCorrupt as error:
            raise self._lost(item, "checksum_failures", str(error)) from error
        return memoryview(data if opened is None else opened)

    def _checked_head(self, item: _Stored, head: bytes | None) -> list[Header]:
        if head is None:
            raise self._lost(item, "read_errors", "its header is gone")
        try:
            return item.decode_head(head)
        except KVCorrupt as error:
            raise self._lost(item, "checksum_failures", str(error)) from error

    def _lost(self, item: _Stored, counter: str, reason: str) -> KVMissing:
        self._store.counters.add(counter)
        self._store.condemn(item)
        return KVMissing(f"segment {item.segment.key[:12]} in Redis: {reason}")


class RedisWriter:
    """A `KVWriter` that sends each layer as it comes; nothing of it is matchable before `commit`."""

    def __init__(self, store: RedisKVStore, writer: str, own: Sequence[_Stored], there: set[str]) -> None:
        self._store, self._writer, self._own, self._there = store, writer, own, there
        self._entries: list[list[bytes]] = [[] for _ in own]  # of the headers
        self._seals = [None if store.keyring is None else store.keyring.new_seal() for _ in own]
        self._closed = False

    def write_layer(self, layer: int, segment: int, data: memoryview) -> None:
        """Layers of a segment come in order. Raises ValueError, OSError."""
        if self._closed:
            raise ValueError("the writer is closed")
        item, entries = self._own[segment], self._entries[segment]
        if data.nbytes != item.layer_bytes:
            raise ValueError(f"got {data.nbytes} bytes for segment {segment}, expected {item.layer_bytes}")
        if item.segment.key in self._there:
            return
        if layer != len(entries):
            raise ValueError(f"got layer {layer} of segment {segment}, expected layer {len(entries)}")
        seal = self._seals[segment]
        whole, entry = item.block(layer).encode_layer(layer, data.tobytes(), self._store.keyring, seal)
        pieces = [bytes(whole[at : at + PART_BYTES]) for at in range(0, len(whole), PART_BYTES)]
        self._store.put(dict(zip(item.part_names(layer), pieces, strict=True)))
        entries.append(entry)
        self._store.counters.add("written_bytes", amount=len(whole))

    def groups_done(self) -> int:
        """All where everything is stored already, else none: unfinished work is not kept."""
        return self._store.layout.num_groups if not self._fresh else 0

    def flush(self) -> None:
        """Nothing waits."""

    def commit(self) -> None:
        """Raises KVError if layers are missing or the room was given to others, OSError."""
        if self._closed:
            raise ValueError("the writer is closed")
        layout = self._store.layout
        written = self._written()
        least = min((len(entries) for _, entries, _ in written), default=layout.num_layers)
        if least < layout.num_layers:
            groups = least // layout.layers_per_group
            raise KVError(f"got {groups} of {layout.num_groups} layer groups, expected all at commit")
        heads = {item.head_name: item.encode_head(entries, seal) for item, entries, seal in written}
        if heads:
            self._store.put(heads)
        self._closed = True
        duplicates = self._store.commit(self._writer, self._fresh)
        if duplicates < 0:
            raise KVError("the room of this writer was given to others, nothing is stored")
        if duplicates:
            self._store.counters.add("duplicate_segments", amount=duplicates)

    def suspend(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._store.abort(self._writer, self._fresh)

    @property
    def _fresh(self) -> list[_Stored]:
        return [item for item in self._own if item.segment.key not in self._there]

    def _written(self) -> list[tuple[_Stored, list[bytes], Seal | None]]:
        each = zip(self._own, self._entries, self._seals, strict=True)
        return [written for written in each if written[0].segment.key not in self._there]


def _keys(chain: Sequence[Segment]) -> list[str]:
    return [segment.key for segment in chain]
