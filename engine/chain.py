"""KV keys: a document's tokens as a chain of fixed segments, each key covering everything before it.

Torch-free. A key is blake3 over (parent key, token ids of this segment); the root covers the tenant salt and
the engine digest, so KV of another tenant, model, policy or numerics can never match.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

SEGMENT_TOKENS = 4096

TokenIds = NDArray[np.uint32]


@dataclass(frozen=True)
class Segment:
    """One link of the chain: tokens [start, end) of the prefix; `key` covers tokens [0, end)."""

    index: int
    start: int
    end: int
    key: str

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def segment_chain(tokens: TokenIds | Sequence[int], *, salt: bytes, digest: str) -> list[Segment]:
    """Cut `tokens` ([tokens], uint32) into segments of SEGMENT_TOKENS (the last may be shorter) and key them.

    `salt` is the tenant's secret salt, `digest` the engine's (`EngineDigest.hex`). Two prefixes share their
    leading segments exactly when salt, digest and all token ids up to that segment's end are equal.
    """
    ids = np.ascontiguousarray(tokens, dtype="<u4")
    parent = blake3(len(salt).to_bytes(4, "little") + salt + digest.encode()).digest()
    chain = []
    for index, start in enumerate(range(0, len(ids), SEGMENT_TOKENS)):
        piece = ids[start : start + SEGMENT_TOKENS]
        parent = blake3(parent + piece.tobytes()).digest()
        chain.append(Segment(index, start, start + len(piece), parent.hex()))
    return chain
