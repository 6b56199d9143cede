"""What computes the rows of a prefill: the contract between engine.prefill and a device, and the choice of one."""

from collections.abc import Callable, Iterator, Sequence
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


def prefill_rows(
    model: Model,
    chain: Sequence[Segment],
    first_segment: int,
    settings: SparseSettings,
    work: PrefillWork,
    kv: KVFormat,
) -> PrefillRows:
    """For the device that `model` is on; `chain[first_segment:]` is new."""
    if model.device.type == "cuda":
        from engine.cuda.rows import CudaRows

        return CudaRows(model, chain, first_segment, settings, kv)
    from engine.cpu_rows import CpuRows

    return CpuRows(model, chain, first_segment, settings, work, kv)
