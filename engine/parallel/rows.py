"""Prefill's rows over several ranks. Each projects its own segments, all exchange K and V, each attends its own.

What is exchanged is K and V as they are kept, packed: half the bytes where they are quantised, and everybody attends to
the same values. Every decision is taken per segment, and linears work on one segment at a time, so that KV is the same
to the bit on any number of ranks.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.chain import Segment
from engine.interfaces import KVLayout
from engine.model import Model
from engine.parallel.deal import Round
from engine.parallel.link import Gathering, Link
from engine.prefill_rows import Keep, RowsInHalves, Stripe, places

# Rounds whose exchange is under way while an earlier one attends: so far may one rank be behind another for nothing.
_ROUNDS_AHEAD = 1
_ALIGNMENT = 512


class SharedRows:
    """One rank's part. Every rank calls the same methods in the same order."""

    def __init__(self, rows: RowsInHalves, rounds: list[Round], link: Link, layout: KVLayout, model: Model) -> None:
        self.rows = rows
        self._rounds, self._link, self._layout, self._model = rounds, link, layout, model
        owners = {segment: rank for turn in rounds for rank, stripe in enumerate(turn) for segment in stripe}
        self._owners = sorted(owners.items(), key=lambda item: item[0].index)
        self._places, self._num_rows = places([segment for segment, _ in self._owners])
        # Of the layer under way: what the others count on, and what has begun.
        self._to_gather: deque[Round] = deque()
        self._waiting: deque[tuple[Round, Stripe, Gathering]] = deque()

    @property
    def hidden_bytes(self) -> int:
        """Of all ranks."""
        return self._num_rows * self._model.spec.hidden * self._model.dtype.itemsize

    def load(self, stored: Sequence[Segment], buffers: Sequence[memoryview] | None) -> None:
        """K and V of the stored segments from rank 0, which alone has `buffers`, to everybody."""
        for index, segment in enumerate(stored):
            size = self._layout.layer_bytes(segment.num_tokens)
            packed = torch.empty(size, dtype=torch.uint8, device=self._link.device)
            if buffers is not None:
                packed.copy_(torch.from_numpy(np.frombuffer(buffers[index], dtype=np.uint8).copy()))
            self._link.broadcast(packed)
            self.rows.place(segment, packed)

    def layer(self, layer: int, keep: Keep | None) -> Iterator[Segment | None]:
        """As `PrefillRows.layer`; a round's segments count as done when this rank has attended its own of them."""
        self._to_gather.extend(self._rounds)
        for turn in self._rounds:
            stripe = yield from self.rows.project(layer, turn[self._link.rank])
            self._waiting.append((turn, stripe, self._gather(stripe.packed)))
            stripe.packed.clear()
            if len(self._waiting) > _ROUNDS_AHEAD:
                yield from self._attend(keep)
        while self._waiting:
            yield from self._attend(keep)

    def leave_layer(self) -> None:
        """Take part in what is left of the exchanges of the layer under way, with no matter what."""
        begun = [gathering for _, _, gathering in self._waiting]
        self._waiting.clear()
        begun += [self._gather([]) for _ in range(len(self._to_gather))]
        for gathering in begun:
            for _ in self._link.finish(gathering):
                pass

    def collect(self, hidden: NDArray[np.uint8] | None) -> None:
        """All ranks' hidden states into rank 0's `hidden` [hidden_bytes], in the order of the segments."""
        for segment, owner in self._owners:
            if hidden is None:
                if owner == self._link.rank:
                    self._link.send(self.rows.hidden_of(segment).view(torch.uint8), 0)
                continue
            part = self._part(segment, owner)
            if owner != self._link.rank:
                self._link.receive(part, owner)
            self._bytes_of(hidden, segment)[:] = part.cpu().numpy()

    def spread(self, hidden: NDArray[np.uint8] | None) -> None:
        """The way back of `collect`."""
        for segment, owner in self._owners:
            if hidden is None:
                if owner == self._link.rank:
                    self._link.receive(self.rows.hidden_of(segment).view(torch.uint8), 0)
                continue
            part = self._part(segment, owner)
            part.copy_(torch.from_numpy(self._bytes_of(hidden, segment).copy()))
            if owner != self._link.rank:
                self._link.send(part, owner)

    def _part(self, segment: Segment, owner: int) -> torch.Tensor:
        """The segment's hidden states, or room for those of another rank: [rows, bytes] uint8."""
        if owner == self._link.rank:
            return self.rows.hidden_of(segment).view(torch.uint8)
        _, rows = self._places[segment.index]
        size = self._model.spec.hidden * self._model.dtype.itemsize
        return torch.empty(rows, size, dtype=torch.uint8, device=self._link.device)

    def _bytes_of(self, hidden: NDArray[np.uint8], segment: Segment) -> NDArray[np.uint8]:
        first, rows = self._places[segment.index]
        return hidden.reshape(self._num_rows, -1)[first : first + rows]

    # --- one round -----------------------------------------------------------------------------------------------

    def _gather(self, packed: list[torch.Tensor]) -> Gathering:
        turn = self._to_gather.popleft()
        largest = max(sum(map(self._bytes, stripe)) for stripe in turn)
        own = torch.empty(-(-largest // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device=self._link.device)
        if packed:
            torch.cat(packed, out=own[: sum(part.numel() for part in packed)])
        return self._link.gather(own)

    def _attend(self, keep: Keep | None) -> Iterator[Segment | None]:
        """The oldest round that waits."""
        turn, stripe, gathering = self._waiting[0]
        for _ in self._link.finish(gathering):
            yield None
        self._waiting.popleft()
        for rank, segments in enumerate(turn):
            first = 0
            for segment in segments:
                packed = gathering.parts[rank, first : first + self._bytes(segment)]
                first += len(packed)
                if rank != self._link.rank:
                    self.rows.place(segment, packed)
                if keep is not None:
                    self.rows.send(segment, packed, keep)
        for _ in self.rows.attend(stripe):
            yield None
        yield from (segment for segments in turn for segment in segments)

    def _bytes(self, segment: Segment) -> int:
        return self._layout.layer_bytes(segment.num_tokens)
