"""The engine digest: everything besides the tokens that decides what a segment's KV is, to the bit. Torch-free."""

from dataclasses import dataclass

from blake3 import blake3

from engine.sparse.settings import SparseSettings

# Raised whenever a change of code changes KV: tiles, order of operations, sampling, storage format.
ENGINE_VERSION = 2


@dataclass(frozen=True)
class EngineDigest:
    """Two engines with equal digests may share KV; the template is not in it (its tokens are in the chain)."""

    weights: str  # of the files, adapter merged
    architecture: str  # the spec, RoPE included
    linear_dtype: str
    kv_format: str
    numerics: str  # cpu or cuda
    sparse: SparseSettings

    @property
    def hex(self) -> str:
        parts = (
            f"engine {ENGINE_VERSION}",
            self.weights,
            self.architecture,
            self.linear_dtype,
            self.kv_format,
            self.numerics,
            self.sparse.canonical(),
        )
        return blake3("\n".join(parts).encode()).hexdigest()
