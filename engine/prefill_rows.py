"""What computes the rows of a prefill: the contract between engine.prefill and a device, and the choice of one."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.chain import Segment, TokenIds
from engine.kv_format import KVFormat
from engine.model import Model
from engine.sparse.report import AttentionReport
from engine.sparse.settings import SparseSettings
from engine.work import PrefillWork

# Takes one segment's KV of a layer, by the segment's place among the new ones; the bytes are copied before it returns.
Keep = Callable[[int, memoryview], None]
# A document's last segment is padded to a multiple of it.
ROW_GRANULE = 64


class PrefillRows(Protocol):
    """Hidden states of all new rows and K and V of one layer, on one device.

    Rows count from the first segment that isn't stored. Nothing here depends on how the work is cut into steps.
    """

    report: AttentionReport

    @property
    def hidden_bytes(self) -> int: ...

    def embed(self, tokens: TokenIds) -> Iterator[None]:
        """Hidden states of the new tokens, [new tokens]; each `yield` ends a bounded piece."""
        ...

    def load(self, buffers: Sequence[memoryview]) -> None:
        """K and V of the stored leading segments in the layer that is computed next."""
        ...

    def layer(self, layer: int, keep: Keep | None) -> Iterator[Segment | None]:
        """All new rows through one layer; yields each segment once it is done, and None between bounded pieces."""
        ...

    def settle(self) -> None:
        """Wait until all KV was given to `keep` and the report is complete. Raises what `keep` raised."""
        ...

    def snapshot(self) -> NDArray[np.uint8]:
        """The hidden states, [hidden_bytes]: a resume point."""
        ...

    def restore(self, hidden: NDArray[np.uint8]) -> None: ...

    def last_logits(self) -> torch.Tensor:
        """[vocabulary] float32 of the last token, on the host."""
        ...

    def close(self) -> None:
        """Give the memory back; safe to call twice."""
        ...


@dataclass(frozen=True)
class Stripe:
    """Neighbouring segments between the two halves of a layer: their queries wait for keys."""

    layer: int
    # (segments, their queries in the device's own form)
    parts: list[tuple[list[Segment], torch.Tensor]] = field(default_factory=list)
    packed: list[torch.Tensor] = field(default_factory=list)  # K and V as they are kept, [bytes] uint8 a segment


class RowsInHalves(PrefillRows, Protocol):
    """Rows whose layers can be cut in two, where K and V of segments computed elsewhere come in."""

    def project(self, layer: int, segments: Sequence[Segment]) -> Generator[None, None, Stripe]:
        """First half, for neighbouring segments of its own: queries; K and V into their places, and packed."""
        ...

    def place(self, segment: Segment, packed: torch.Tensor) -> None:
        """K and V of a segment computed elsewhere, [bytes] uint8 as they are kept."""
        ...

    def attend(self, stripe: Stripe) -> Iterator[None]:
        """Second half. All K and V up to the stripe's end are in their places."""
        ...

    def send(self, segment: Segment, packed: torch.Tensor, keep: Keep) -> None:
        """A segment's packed K and V to `keep`, now or behind the caller's back until `settle`."""
        ...

    def hidden_of(self, segment: Segment) -> torch.Tensor:
        """The hidden states of one of its own segments, [rows, hidden]; the document's last one with its padding."""
        ...


def padded_rows(segment: Segment) -> int:
    return -(-segment.num_tokens // ROW_GRANULE) * ROW_GRANULE


def places(own: Sequence[Segment]) -> tuple[dict[int, tuple[int, int]], int]:
    """Where the hidden states of segments lie when they are packed: index → (first row, rows), and rows in all."""
    found, first = {}, 0
    for segment in own:
        found[segment.index] = first, padded_rows(segment)
        first += padded_rows(segment)
    return found, first


def own_tokens(tokens: TokenIds, own: Sequence[Segment], first: Segment) -> NDArray[np.int64]:
    """Token ids of `own`, each segment padded to whole granules. `tokens` begin with segment `first`."""
    where, rows = places(own)
    ids = np.zeros(rows, dtype=np.int64)
    for segment in own:
        at, _ = where[segment.index]
        ids[at : at + segment.num_tokens] = tokens[segment.start - first.start : segment.end - first.start]
    return ids


def prefill_rows(
    model: Model,
    chain: Sequence[Segment],
    first_segment: int,
    settings: SparseSettings,
    work: PrefillWork,
    kv: KVFormat,
    own: Sequence[Segment] | None = None,
) -> RowsInHalves:
    """For the device that `model` is on; `chain[first_segment:]` is new, and all of it or `own` is computed here."""
    if model.device.type == "cuda":
        from engine.cuda.rows import CudaRows

        return CudaRows(model, chain, first_segment, settings, kv, own)
    from engine.cpu_rows import CpuRows

    return CpuRows(model, chain, first_segment, settings, work, kv, own)
