"""Prefill's rows on the CPU: a segment at a time, on fixed tiles."""

from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine import forward
from engine.chain import SEGMENT_TOKENS, Segment, TokenIds
from engine.kv_format import KVFormat
from engine.model import Model
from engine.prefill_rows import ROW_GRANULE, Keep, Stripe, own_tokens, places
from engine.sparse.attend import attend
from engine.sparse.report import AttentionReport
from engine.sparse.settings import SparseSettings
from engine.sparse.task import SegmentTask, segment_seed
from engine.threads import release_freed_memory
from engine.work import PrefillWork

# Positions whose rotary cosines and sines are kept from layer to layer: 256 bytes each for heads of 64.
_KEPT_ROTATIONS = 65_536


class CpuRows:
    """`PrefillRows` in host memory."""

    def __init__(
        self,
        model: Model,
        chain: Sequence[Segment],
        first_segment: int,
        settings: SparseSettings,
        work: PrefillWork,
        kv: KVFormat,
        own: Sequence[Segment] | None = None,
    ) -> None:
        """`own`: the new segments whose rows are computed here, in order; all of them where not given."""
        spec = model.spec
        self._model, self._chain, self._settings, self._kv_format = model, chain, settings, kv
        self._tile_rows = work.tile_rows
        self._rotations: dict[int, forward.Rotation] = {}
        self._first_segment = first_segment
        self._own = chain[first_segment:] if own is None else own
        self._places, padded = places(self._own)
        self._hidden = torch.zeros(padded, spec.hidden, dtype=model.dtype)
        self._kv = torch.zeros(2, spec.kv_heads, chain[-1].end, spec.head_dim, dtype=model.dtype)
        self.report = AttentionReport()

    @property
    def hidden_bytes(self) -> int:
        return self._hidden.nbytes

    def embed(self, tokens: TokenIds) -> Iterator[None]:
        ids = torch.from_numpy(own_tokens(tokens, self._own, self._chain[self._first_segment]))
        for first in range(0, len(ids), SEGMENT_TOKENS):
            rows = slice(first, first + SEGMENT_TOKENS)
            self._hidden[rows] = forward.embed(self._model, ids[rows])
            yield

    def load(self, buffers: Sequence[memoryview]) -> None:
        for segment, buffer in zip(self._chain, buffers, strict=False):
            # Read only, which torch has no notion of; so it is copied.
            self.place(segment, torch.from_numpy(np.frombuffer(buffer, dtype=np.uint8).copy()))

    def layer(self, layer: int, keep: Keep | None) -> Iterator[Segment | None]:
        for segment in self._own:
            stripe = yield from self.project(layer, [segment])
            yield from self.attend(stripe)
            if keep is not None:
                self.send(segment, stripe.packed[0], keep)
            yield segment

    def project(self, layer: int, segments: Sequence[Segment]) -> Generator[None, None, Stripe]:
        stripe = Stripe(layer)
        for segment in segments:
            queries = []
            for tile in self._tiles(segment):
                queries.append(self._project(layer, segment, tile))
                yield
            rows = self._kv[:, :, segment.start : segment.end]
            stripe.parts.append(([segment], queries[0] if len(queries) == 1 else torch.cat(queries)))
            stripe.packed.append(self._kv_format.pack(rows.flatten(0, 1), rows))
        return stripe

    def attend(self, stripe: Stripe) -> Iterator[None]:
        for (segment,), queries in stripe.parts:
            yield from self._attend(stripe.layer, segment, self._tiles(segment), queries)

    def place(self, segment: Segment, packed: torch.Tensor) -> None:
        self._kv_format.unpack(packed, self._kv[:, :, segment.start : segment.end])

    def send(self, segment: Segment, packed: torch.Tensor, keep: Keep) -> None:
        keep(segment.index - self._first_segment, packed.numpy().data)

    def hidden_of(self, segment: Segment) -> torch.Tensor:
        first, size = self._places[segment.index]
        return self._hidden[first : first + size]

    def settle(self) -> None:
        """Everything is done at once here."""

    def snapshot(self) -> NDArray[np.uint8]:
        return self._hidden.view(torch.uint8).numpy().reshape(-1)

    def restore(self, hidden: NDArray[np.uint8]) -> None:
        self.snapshot()[:] = hidden

    def last_logits(self) -> torch.Tensor:
        last = self._chain[-1]
        return forward.logits(self._model, self.hidden_of(last)[last.num_tokens - 1 : last.num_tokens])[0]

    def close(self) -> None:
        self._hidden = self._kv = torch.empty(0)
        self._rotations.clear()
        release_freed_memory()

    def _project(self, layer: int, segment: Segment, tile: range) -> torch.Tensor:
        """A tile's queries; its K and V go into their places."""
        hidden = self.hidden_of(segment)[tile.start - segment.start : tile.stop - segment.start]
        weights = self._model.layers[layer]
        q, k, v = forward.queries_keys_values(self._model, weights, hidden, self._rotation(tile))
        real = min(tile.stop, segment.end)
        self._kv[0, :, tile.start : real] = k[: real - tile.start].transpose(0, 1)
        self._kv[1, :, tile.start : real] = v[: real - tile.start].transpose(0, 1)
        return q

    def _attend(self, layer: int, segment: Segment, tiles: list[range], q: torch.Tensor) -> Iterator[None]:
        """Attention, then the rest of the layer in place of the hidden states."""
        out = torch.empty(q.shape, dtype=q.dtype)
        out[segment.num_tokens :] = 0
        task = SegmentTask(
            layer=layer,
            start=segment.start,
            q=q[: segment.num_tokens],
            k=self._kv[0, :, : segment.end],
            v=self._kv[1, :, : segment.end],
            out=out[: segment.num_tokens],
            seed=segment_seed(segment, layer),
        )
        yield from attend(task, self._settings, self.report)
        weights, hidden = self._model.layers[layer], self.hidden_of(segment)
        for tile in tiles:
            rows = slice(tile.start - segment.start, tile.stop - segment.start)
            hidden[rows] = forward.finish_layer(self._model, weights, hidden[rows], out[rows])
            yield

    def _tiles(self, segment: Segment) -> list[range]:
        """Row tiles at fixed positions; the document's last one is padded to the granule, beyond its end."""
        end = -(-segment.end // ROW_GRANULE) * ROW_GRANULE
        return [range(start, min(start + self._tile_rows, end)) for start in range(segment.start, end, self._tile_rows)]

    def _rotation(self, tile: range) -> forward.Rotation:
        """Of the tile's positions. A start always comes with the same length."""
        kept = self._rotations.get(tile.start)
        if kept is not None:
            return kept
        rotation = forward.rotation(self._model, tile.start, len(tile))
        if sum(len(other.cos) for other in self._rotations.values()) + len(tile) <= _KEPT_ROTATIONS:
            self._rotations[tile.start] = rotation
        return rotation
