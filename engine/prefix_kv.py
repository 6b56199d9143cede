"""One prefix's KV, read layer by layer from the store and shared by the answers on it."""

import os
from typing import Protocol

import torch

from engine.chain import Segment
from engine.errors import OutOfMemory
from engine.interfaces import CacheState
from engine.kv_format import KVFormat
from engine.kv_source import OpensReaders
from engine.model import Model
from engine.stored_kv import as_tensor
from engine.threads import release_freed_memory
from kernels.full_attention import full_attention

WARM: dict[str, CacheState] = {"host": "warm_host", "disk": "warm_disk", "shared": "warm_shared"}
# Left to the rest of the process and the machine.
_MARGIN_BYTES = 256 << 20


class Prefix(Protocol):
    """What answers need of a prefix's KV."""

    holders: int
    lost: bool  # a block was gone or corrupt: of no use to further answers

    @property
    def num_tokens(self) -> int: ...

    @property
    def tier(self) -> CacheState:
        """Where this answer's KV came from."""
        ...

    @property
    def computed_tokens(self) -> int:
        """Of the prefix: computed again for this answer and not taken from the store."""
        ...

    def attend(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [rows, heads, head_dim] over the whole prefix: (out, lse [rows, heads]).

        Raises KVMissing where a block turns out to be gone or corrupt.
        """
        ...

    def close(self) -> None: ...


class PrefixKV:
    """A `Prefix` in host memory; `layer(i)` is [2, kv_heads, tokens, head_dim]. All read, the lease ends."""

    def __init__(self, model: Model, source: OpensReaders, chain: list[Segment], kv: KVFormat | None = None) -> None:
        """Raises KVMissing, OutOfMemory."""
        self._model, self._chain, self._kv_format = model, chain, kv or KVFormat(model.dtype)
        spec = model.spec
        self.num_tokens = chain[-1].end
        needed = self.num_tokens * spec.kv_bytes_per_token(model.dtype.itemsize) * spec.num_layers
        available = available_bytes()
        if available is not None and needed + _MARGIN_BYTES > available:
            raise OutOfMemory(needed, max(available - _MARGIN_BYTES, 0))
        self._source = source
        self._reader = source.open_reader(chain)
        self._layers: list[torch.Tensor] = []
        self._tier = WARM[self._reader.tier]
        self.holders = 0
        self.lost = False

    @property
    def tier(self) -> CacheState:
        return self._tier

    @property
    def computed_tokens(self) -> int:
        return self._source.computed_tokens

    @property
    def loaded(self) -> bool:
        return len(self._layers) == self._model.spec.num_layers

    def layer(self, index: int) -> torch.Tensor:
        """Raises KVMissing where a block turns out to be gone or corrupt."""
        while len(self._layers) <= index:
            spec = self._model.spec
            kv = torch.empty(2, spec.kv_heads, self.num_tokens, spec.head_dim, dtype=self._model.dtype)
            try:
                buffers = self._reader.read_layer(len(self._layers))
            except BaseException:
                self.lost = True
                raise
            for segment, buffer in zip(self._chain, buffers, strict=True):
                self._kv_format.unpack(as_tensor(buffer), kv[:, :, segment.start : segment.end])
            self._layers.append(kv)
            if self.loaded:
                self._tier = WARM[self._reader.tier]
                self._reader.close()
        return self._layers[index]

    def attend(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.layer(layer)
        return full_attention(q, keys, values)

    def close(self) -> None:
        self._reader.close()
        if self._layers:
            self._layers.clear()
            release_freed_memory()


def available_bytes() -> int | None:
    """Host memory that can be had without swapping, None where the system doesn't say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
