"""In which form KV is kept: as the model computes it, or FP8 or INT8 with scales. Prefill attends to what is kept."""

from dataclasses import dataclass
from typing import Literal

import torch

from engine.interfaces import SCALE_TOKENS, KVLayout
from engine.kv_store import layout_for
from engine.spec import ModelSpec
from kernels.kv_quant import dequantise_kv, quantise_kv

KVDtype = Literal["auto", "bfloat16", "float32", "float8", "int8"]
_QUANTISED = {"float8": torch.float8_e4m3fn, "int8": torch.int8}
_SCALE_BYTES = 4


@dataclass(frozen=True)
class KVFormat:
    """`dtype` is what a number of the kept K and V takes: the model's own, or float8_e4m3fn or int8 with scales."""

    dtype: torch.dtype

    @property
    def quantised(self) -> bool:
        return self.dtype in _QUANTISED.values()

    def layout(self, spec: ModelSpec) -> KVLayout:
        scale_bytes = 2 * spec.kv_heads * _SCALE_BYTES if self.quantised else 0
        return layout_for(spec.num_layers, spec.kv_bytes_per_token(self.dtype.itemsize), scale_bytes)

    def pack(self, new: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """One segment's K and V of a layer as they are kept: [bytes] uint8, dense.

        new [2 * kv_heads, tokens, head_dim]: K's heads, then V's. rows [2, kv_heads, tokens, head_dim] gets the values
        that are kept; `new` may be a view of it. Both have any strides but a dense last dimension.
        """
        heads, tokens, _ = new.shape
        flat = rows.flatten(0, 1)
        if not self.quantised:
            if flat.data_ptr() != new.data_ptr():
                flat.copy_(new)
            return new.contiguous().view(torch.uint8).flatten()
        layer_bytes = new.numel() + heads * -(-tokens // SCALE_TOKENS) * _SCALE_BYTES
        packed = torch.empty(layer_bytes, dtype=torch.uint8, device=new.device)
        values, scales = self.split(packed, kv_heads=heads // 2, tokens=tokens)
        quantise_kv(new, stored=values.flatten(0, 1), scales=scales.flatten(0, 1), rounded=flat)
        return packed

    def unpack(self, packed: torch.Tensor, rows: torch.Tensor) -> None:
        """Write one kept segment [bytes] uint8 into rows [2, kv_heads, tokens, head_dim] on the same device."""
        if not self.quantised:
            rows.copy_(packed.view(rows.dtype).view(rows.shape))
            return
        values, scales = self.split(packed, kv_heads=rows.shape[1], tokens=rows.shape[2])
        for one, stored, scale in zip(rows, values, scales, strict=True):
            dequantise_kv(stored, scale, dtype=rows.dtype, out=one)

    def split(self, packed: torch.Tensor, *, kv_heads: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantised K and V as they lie in `packed`: values [2, kv_heads, tokens, head_dim], scales [2, kv_heads,
        blocks of 128 tokens]."""
        blocks = -(-tokens // SCALE_TOKENS)
        scale_bytes = 2 * kv_heads * blocks * _SCALE_BYTES
        values = packed[: len(packed) - scale_bytes].view(self.dtype)
        scales = packed[len(packed) - scale_bytes :].view(torch.float32)
        return values.view(2, kv_heads, tokens, -1), scales.view(2, kv_heads, blocks)


def kv_format(name: str, model_dtype: torch.dtype) -> KVFormat:
    """auto: as the model computes. Raises ValueError for an unknown name, or one that is not the model's own type."""
    own = {torch.bfloat16: "bfloat16", torch.float32: "float32"}[model_dtype]
    if name in _QUANTISED:
        return KVFormat(_QUANTISED[name])
    if name not in ("auto", own):
        raise ValueError(f"kv_dtype: got {name!r}, expected auto, {own}, float8 or int8")
    return KVFormat(model_dtype)
