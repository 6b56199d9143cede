"""A prefix's KV for answers on a GPU: whole on the device where it fits, else streamed from host memory each step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.chain import Segment
from engine.cuda.memory import new_event, new_stream
from engine.errors import OutOfMemory
from engine.interfaces import SCALE_TOKENS, CacheState
from engine.kv_format import KVFormat
from engine.kv_source import OpensReaders
from engine.model import Model
from engine.prefix_kv import WARM, available_bytes
from engine.stored_kv import as_tensor
from kernels.decode_attention import decode_attention, pages_view
from kernels.full_attention import full_attention
from kernels.kv_quant import dequantise_kv

# Tokens of quantised KV that are unpacked at a time for a question's rows.
_UNPACKED_TOKENS = 131_072


@dataclass(frozen=True)
class DeviceLayer:
    """One layer's KV as it is kept, padded to whole pages of 128 tokens, whose padding is never read."""

    values: torch.Tensor  # [2, kv_heads, pages * 128, head_dim] of the kept dtype
    scales: torch.Tensor | None  # [2, kv_heads, pages] float32

    @classmethod
    def empty(cls, model: Model, kv: KVFormat, num_tokens: int) -> "DeviceLayer":
        spec, pages = model.spec, -(-num_tokens // SCALE_TOKENS)
        shape = (2, spec.kv_heads, pages * SCALE_TOKENS, spec.head_dim)
        values = torch.empty(shape, dtype=kv.dtype, device=model.device)
        scales = None
        if kv.quantised:
            scales = torch.empty(2, spec.kv_heads, pages, dtype=torch.float32, device=model.device)
        return cls(values, scales)

    def put(self, kv: KVFormat, segment: Segment, packed: torch.Tensor) -> None:
        """Copy a segment [bytes] uint8 from host memory to its place, on the current stream."""
        kv_heads, tokens = self.values.shape[1], segment.num_tokens
        packed = packed.to(self.values.device, non_blocking=True)
        place = self.values[:, :, segment.start : segment.end]
        if self.scales is None:
            place.copy_(packed.view(self.values.dtype).view(place.shape))
            return
        values, scales = kv.split(packed, kv_heads=kv_heads, tokens=tokens)
        place.view(torch.uint8).copy_(values.view(torch.uint8))
        first = segment.start // SCALE_TOKENS
        self.scales[:, :, first : first + scales.shape[2]] = scales

    def attend(self, q: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        if len(q) == 1:
            return self.decode(q, *_table(num_tokens, q.device))
        keys, values = self.values[:, :, :num_tokens]
        if self.scales is None:
            return full_attention(q, keys, values)
        outs, lses = [], []
        for first in range(0, num_tokens, _UNPACKED_TOKENS):
            last = min(first + _UNPACKED_TOKENS, num_tokens)
            blocks = slice(first // SCALE_TOKENS, -(-last // SCALE_TOKENS))
            unpacked = [
                dequantise_kv(stored[:, first:last], scales[:, blocks].contiguous(), dtype=q.dtype)
                for stored, scales in zip((keys, values), self.scales, strict=True)
            ]
            out, lse = full_attention(q, *unpacked)
            outs.append(out)
            lses.append(lse)
        return _merge(outs, lses)

    def decode(self, q: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One row a batch entry; table [batch, pages], lengths [batch], both int32. No host sync."""
        keys, values = (pages_view(one) for one in self.values)
        k_scales, v_scales = (None, None) if self.scales is None else (one.T for one in self.scales)
        return decode_attention(q, keys, values, table, lengths, k_scales=k_scales, v_scales=v_scales)


class DevicePrefix:
    """A `Prefix` whose KV is on the device: read once from the store, the next layer's bytes on their way meanwhile."""

    def __init__(self, model: Model, source: OpensReaders, chain: list[Segment], kv: KVFormat) -> None:
        """Raises KVMissing."""
        self._model, self.chain, self._kv_format = model, chain, kv
        self.num_tokens = chain[-1].end
        self._source = source
        self._reader = source.open_reader(chain)
        self._tier: CacheState = WARM[self._reader.tier]
        self._layers: list[DeviceLayer] = []
        self._stream = new_stream(model.device)
        self.holders = 0
        self.lost = False

    @property
    def tier(self) -> CacheState:
        return self._tier

    @property
    def computed_tokens(self) -> int:
        return 0 if self._tier == "warm_device" else self._source.computed_tokens

    @property
    def loaded(self) -> bool:
        return len(self._layers) == self._model.spec.num_layers

    def layer(self, index: int) -> DeviceLayer:
        while len(self._layers) <= index:
            try:
                buffers = self._reader.read_layer(len(self._layers))
            except BaseException:
                self.lost = True
                raise
            self._layers.append(self._copied(buffers))
            if self.loaded:
                self._tier = WARM[self._reader.tier]
                self._reader.close()
        return self._layers[index]

    @property
    def layers(self) -> list[DeviceLayer]:
        """All layers; only once an answer's first step has read them."""
        return [self.layer(index) for index in range(self._model.spec.num_layers)]

    def _copied(self, buffers: Sequence[memoryview]) -> DeviceLayer:
        layer = DeviceLayer.empty(self._model, self._kv_format, self.num_tokens)
        compute = torch.cuda.current_stream(self._model.device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            for segment, buffer in zip(self.chain, buffers, strict=True):
                layer.put(self._kv_format, segment, as_tensor(buffer))
        # The buffers may be used again once they are let go of: the host waits, the device goes on with its layer.
        self._stream.synchronize()
        return layer

    def stay(self) -> None:
        """Kept for the next answer: from now on its KV comes from the device."""
        self._tier = "warm_device"

    def attend(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(layer).attend(q, self.num_tokens)

    def close(self) -> None:
        self._reader.close()
        self._layers.clear()


class StreamedPrefix:
    """A `Prefix` larger than the device's room: host memory keeps it, two layers' buffers take turns on the device."""

    def __init__(self, model: Model, source: OpensReaders, chain: list[Segment], kv: KVFormat) -> None:
        """Raises KVMissing, OutOfMemory where host memory can't keep it."""
        self._model, self._chain, self._kv_format = model, chain, kv
        self.num_tokens = chain[-1].end
        self._source = source
        self._reader = source.open_reader(chain)
        needed = kv.layout(model.spec).layer_bytes(self.num_tokens) * model.spec.num_layers
        free = available_bytes()
        # What the store has in host memory already is not held twice.
        if self._reader.tier != "host" and free is not None and needed > free:
            self._reader.close()
            raise OutOfMemory(needed, free)
        self._tier: CacheState = WARM[self._reader.tier]
        self._kept: list[Sequence[memoryview]] = []  # by layer: the store's buffers, which live while they are seen
        self._slots = [DeviceLayer.empty(model, kv, self.num_tokens) for _ in range(2)]
        self._holds = [-1, -1]  # the layer in each slot
        self._arrived = [new_event(), new_event()]
        self._stream = new_stream(model.device)
        self.holders = 0
        self.lost = False

    @property
    def tier(self) -> CacheState:
        return self._tier

    @property
    def computed_tokens(self) -> int:
        return self._source.computed_tokens

    def attend(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slot = self._stage(layer)
        compute = torch.cuda.current_stream(self._model.device)
        compute.wait_event(self._arrived[slot])
        result = self._slots[slot].attend(q, self.num_tokens)
        self._stage((layer + 1) % self._model.spec.num_layers)
        return result

    def _stage(self, layer: int) -> int:
        """The slot that gets `layer`; its bytes are on their way behind everything computed so far."""
        slot = layer % 2
        if self._holds[slot] != layer:
            buffers = self._read(layer)
            self._stream.wait_stream(torch.cuda.current_stream(self._model.device))
            with torch.cuda.stream(self._stream):
                for segment, buffer in zip(self._chain, buffers, strict=True):
                    self._slots[slot].put(self._kv_format, segment, as_tensor(buffer))
                self._arrived[slot].record()
            self._holds[slot] = layer
        return slot

    def _read(self, layer: int) -> Sequence[memoryview]:
        while len(self._kept) <= layer:
            try:
                self._kept.append(self._reader.read_layer(len(self._kept)))
            except BaseException:
                self.lost = True
                raise
            if len(self._kept) == self._model.spec.num_layers:
                self._tier = WARM[self._reader.tier]
                self._reader.close()
        return self._kept[layer]

    def close(self) -> None:
        torch.cuda.synchronize(self._model.device)
        self._reader.close()
        self._kept.clear()
        self._slots.clear()


def _table(num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    pages = torch.arange(-(-num_tokens // SCALE_TOKENS), dtype=torch.int32, device=device)[None]
    return pages, torch.full((1,), num_tokens, dtype=torch.int32, device=device)


def _merge(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(outs) == 1:
        return outs[0], lses[0]
    lse = torch.stack(lses).logsumexp(0)
    shares = [(part - lse).exp()[..., None] for part in lses]
    return sum((out * share for out, share in zip(outs, shares, strict=True)), torch.zeros(())), lse
