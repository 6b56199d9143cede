"""Rank 0's view of a prefill over several ranks: `PrefillRows` that tell the others what to do."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from engine.chain import Segment, TokenIds
from engine.errors import OutOfMemory, RankLost
from engine.kv_format import KVFormat
from engine.parallel import commands
from engine.parallel.deal import deal
from engine.parallel.link import Link
from engine.parallel.process import RankParts
from engine.parallel.rows import SharedRows
from engine.prefill_rows import Keep, RowsInHalves
from engine.sparse.report import AttentionReport
from engine.sparse.settings import SparseSettings

if TYPE_CHECKING:
    from engine.parallel.group import RankGroup


class LeadingRows:
    """`PrefillRows` over a whole group. Only here are the store, the scheduler and the queue known.

    Everything may raise RankLost; nothing that was computed with a dead rank's part gets to `keep`.
    """

    def __init__(
        self,
        group: "RankGroup",
        link: Link,
        parts: RankParts,
        chain: Sequence[Segment],
        first: int,
        settings: SparseSettings,
        kv: KVFormat,
    ) -> None:
        """Raises RankLost; OutOfMemory where the rows of any rank don't fit its device."""
        self._group, self._stored = group, chain[:first]
        self._closed = False
        rounds = deal(chain[first:], group.size)
        group.tell(commands.Open(chain, first, settings, kv))
        failure: OutOfMemory | None = None
        rows: RowsInHalves | None = None
        try:
            rows = parts.open_rows(chain, first, settings, kv, [part for turn in rounds for part in turn[0]])
        except OutOfMemory as error:
            failure = error
        for answer in group.answers():
            if isinstance(answer, commands.NoMemory):
                failure = failure or OutOfMemory(answer.needed_bytes, answer.available_bytes)
        if failure is not None:
            if rows is not None:
                rows.close()
            group.tell(commands.Close())
            raise failure
        assert rows is not None
        self._rows = rows
        self._shared = SharedRows(rows, rounds, link, kv.layout(parts.model.spec), parts.model)

    @property
    def report(self) -> AttentionReport:
        return self._rows.report

    @report.setter
    def report(self, report: AttentionReport) -> None:
        self._rows.report = report

    @property
    def hidden_bytes(self) -> int:
        return self._shared.hidden_bytes

    def embed(self, tokens: TokenIds) -> Iterator[None]:
        self._group.tell(commands.Embed(tokens))
        yield from self._rows.embed(tokens)

    def load(self, buffers: Sequence[memoryview]) -> None:
        self._group.tell(commands.Load())
        self._shared.load(self._stored, buffers)

    def layer(self, layer: int, keep: Keep | None) -> Iterator[Segment | None]:
        self._group.tell(commands.Layer(layer))
        for piece in self._shared.layer(layer, None if keep is None else self._checked(keep)):
            self._group.check()
            yield piece

    def _checked(self, keep: Keep) -> Keep:
        def checked(segment: int, data: memoryview) -> None:
            self._group.check()
            keep(segment, data)

        return checked

    def settle(self) -> None:
        self._rows.settle()
        self._group.tell(commands.Report())
        for answer in self._group.answers():
            assert isinstance(answer, commands.Reported)
            self.report.add(AttentionReport.from_json(answer.report))

    def snapshot(self) -> NDArray[np.uint8]:
        hidden = np.empty(self.hidden_bytes, dtype=np.uint8)
        self._group.tell(commands.Collect())
        self._shared.collect(hidden)
        self._group.check()
        return hidden

    def restore(self, hidden: NDArray[np.uint8]) -> None:
        self._group.tell(commands.Spread())
        self._shared.spread(hidden)

    def last_logits(self) -> torch.Tensor:
        """Of rank 0, whose the last segment is."""
        logits = self._rows.last_logits()
        self._group.check()
        return logits

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Those who wait for this rank's part in the layer under way can't be told before they have it.
        with contextlib.suppress(RankLost):
            self._group.tell(commands.Close())
            self._shared.leave_layer()
        self._rows.close()
        self._group.give_back()
