"""Small chains and their KV for the store's tests: the bytes of a block follow from its key, so any mix-up shows."""

import hashlib
from collections.abc import Sequence

import numpy as np

from engine.chain import Segment, segment_chain
from engine.interfaces import KVLayout, KVReader, KVStore, KVWriter

LAYOUT = KVLayout(num_layers=5, bytes_per_token=2, layers_per_group=2)  # three groups, the last one half empty


def chain(num_tokens: int, *, seed: int = 0, shared: int = 0) -> list[Segment]:
    """The chain of `num_tokens` random tokens; the first `shared` are the same for every seed."""
    tokens = np.random.default_rng(seed).integers(0, 1000, num_tokens, dtype=np.uint32)
    shared = min(shared, num_tokens)
    tokens[:shared] = np.random.default_rng(99).integers(0, 1000, shared, dtype=np.uint32)
    return segment_chain(tokens, salt=b"salt", digest="digest")


def payload(segment: Segment, layer: int, layout: KVLayout = LAYOUT) -> bytes:
    size = layout.layer_bytes(segment.num_tokens)
    return hashlib.shake_128(f"{segment.key}/{layer}".encode()).digest(size)


def write_layers(writer: KVWriter, own: Sequence[Segment], layers: Sequence[int], layout: KVLayout = LAYOUT) -> None:
    for layer in layers:
        for index, segment in enumerate(own):
            writer.write_layer(layer, index, memoryview(payload(segment, layer, layout)))


def store_chain(store: KVStore, links: Sequence[Segment], *, owner: str = "job", first: int = 0) -> None:
    writer = store.open_writer(links, first=first, owner=owner)
    write_layers(writer, links[first:], range(store.layout.num_layers), store.layout)
    writer.commit()


def assert_right(reader: KVReader, links: Sequence[Segment], layout: KVLayout = LAYOUT) -> None:
    """Every block that `reader` gives is that of `links`."""
    for layer in range(layout.num_layers):
        buffers = reader.read_layer(layer)
        assert [bytes(buffer) for buffer in buffers] == [payload(segment, layer, layout) for segment in links]
