"""From the store's bytes to tensors and back: one (segment, layer) is K then V, each [kv_heads, tokens, head_dim]."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.chain import Segment


def load_segments(kv: torch.Tensor, segments: Sequence[Segment], buffers: Sequence[memoryview]) -> None:
    """Copy one layer's stored segments into kv [2, kv_heads, capacity, head_dim] at their positions."""
    # Through numpy: the store's buffers are read-only, which torch has no notion of.
    target = kv.view(torch.uint8).numpy()
    for segment, buffer in zip(segments, buffers, strict=True):
        stored = np.frombuffer(buffer, dtype=np.uint8).reshape(2, kv.shape[1], segment.num_tokens, -1)
        target[:, :, segment.start : segment.end] = stored


def segment_bytes(kv: torch.Tensor, segment: Segment) -> memoryview:
    """One segment of one layer's kv [2, kv_heads, capacity, head_dim] as the store keeps it."""
    both = kv[:, :, segment.start : segment.end].contiguous()
    data: memoryview = both.view(torch.uint8).numpy().reshape(-1).data
    return data
