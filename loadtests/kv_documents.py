"""Documents for load on the KV store: the bytes of a block follow from its key and layer, so any mix-up shows."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from engine.chain import Segment, segment_chain
from engine.errors import KVMissing
from engine.interfaces import KVLayout, KVStore, KVWriter


def chain_of(num_tokens: int, *, seed: int, shared_tokens: int = 0) -> list[Segment]:
    """The chain of `num_tokens` tokens; the first `shared_tokens` are the same for every seed."""
    tokens = np.full(num_tokens, seed, dtype=np.uint32)
    tokens[:shared_tokens] = 2**31
    return segment_chain(tokens, salt=b"load test", digest="load test")


@lru_cache(maxsize=1024)
def payload(key: str, layer: int, size_bytes: int) -> bytes:
    """What block (`key`, `layer`) holds."""
    return hashlib.shake_128(f"{key}/{layer}".encode()).digest(size_bytes)


def block(segment: Segment, layer: int, layout: KVLayout) -> bytes:
    return payload(segment.key, layer, layout.layer_bytes(segment.num_tokens))


def write_layers(writer: KVWriter, own: Sequence[Segment], layers: Sequence[int], layout: KVLayout) -> None:
    for layer in layers:
        for index, segment in enumerate(own):
            writer.write_layer(layer, index, memoryview(block(segment, layer, layout)))


def write(store: KVStore, links: Sequence[Segment], *, owner: str) -> None:
    """Store what of `links` is missing, as a prefill does. Raises StorageFull, OSError, KVMissing."""
    first = store.match(links)
    reader = store.open_reader(links[:first])  # what is built on must not be evicted meanwhile
    try:
        _write_rest(store, links, first, owner)
    finally:
        reader.close()


def _write_rest(store: KVStore, links: Sequence[Segment], first: int, owner: str) -> None:
    writer = store.open_writer(links, first=first, owner=owner)
    try:
        layout = store.layout
        start = min(writer.groups_done() * layout.layers_per_group, layout.num_layers)
        write_layers(writer, links[first:], range(start, layout.num_layers), layout)
        writer.commit()
    except BaseException:
        writer.suspend()
        raise


@dataclass
class Served:
    """What reading a document gave."""

    segments: int = 0  # of those that matched and were read from end to end
    blocks: int = 0  # compared with what they must be
    wrong: int = 0
    missing: int = 0  # times that the store said that something had gone
    seconds: float = field(default=0.0)


def read(store: KVStore, links: Sequence[Segment]) -> Served:
    """Read what of `links` matches, until it can be read from end to end. Raises OSError."""
    served, started = Served(), time.perf_counter()
    while count := store.match(links):
        try:
            reader = store.open_reader(links[:count])
        except KVMissing:
            served.missing += 1
            continue
        try:
            for layer in range(store.layout.num_layers):
                for segment, data in zip(links, reader.read_layer(layer), strict=False):
                    served.blocks += 1
                    served.wrong += data != block(segment, layer, store.layout)
            served.segments = count
            break
        except KVMissing:
            served.missing += 1
        finally:
            reader.close()
    served.seconds = time.perf_counter() - started
    return served
