"""Public sparse-prefill kernels, where somebody has installed them: whole-layer attention on a GPU.

Each is called as its authors' own code calls it, with their published defaults; queries, keys and values are handed
over in the layout that it wants before its time is taken.
"""

from collections.abc import Callable
from typing import Any

import torch

# () → out [1, heads, tokens, head_dim] or [1, tokens, heads, head_dim], and which axis the heads are on
Run = Callable[[], torch.Tensor]
Prepare = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[Run, int]]

_ESTIMATED_ROWS = 64  # MInference looks at the last ones
_VERTICAL, _SLASH = 1000, 6096


def minference() -> Prepare:
    """Vertical-slash at its default budget, estimated from the last 64 rows. Raises ImportError."""
    from minference.ops.pit_sparse_flash_attention_v2 import vertical_slash_sparse_attention

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Run, int]:
        queries, keys, values = _by_head(q, k, v)

        def run() -> torch.Tensor:
            vertical, slash = _heaviest_lines(queries, keys)
            out: torch.Tensor = vertical_slash_sparse_attention(queries, keys, values, vertical, slash)
            return out

        return run, 1

    return prepare


def flexprefill() -> Prepare:
    """γ = 0.9, τ = 0.1, at least 1,024 tokens. Raises ImportError."""
    from flex_prefill import flex_prefill_attention

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Run, int]:
        queries, keys, values = q[None].contiguous(), *(x.transpose(0, 1)[None].contiguous() for x in (k, v))

        def run() -> torch.Tensor:
            out: torch.Tensor = flex_prefill_attention(
                queries, keys, values, gamma=0.9, tau=0.1, min_budget=1024, gqa_interleave=False
            )
            return out

        return run, 2

    return prepare


def xattention() -> Prepare:
    """Stride 8, threshold 0.9. Raises ImportError."""
    from xattn.src.Xattention import Xattention_prefill

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Run, int]:
        queries, keys, values = _by_head(q, k, v)

        def run() -> torch.Tensor:
            out: torch.Tensor = Xattention_prefill(queries, keys, values, stride=8, threshold=0.9, causal=True)
            return out

        return run, 1

    return prepare


def flashprefill() -> Prepare:
    """Its own defaults; its repository's folder must be on the path. Raises ImportError."""
    from ops.flashprefill_native_forward import FlashPrefill

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Run, int]:
        queries, keys, values = q[None].contiguous(), *(x.transpose(0, 1)[None].contiguous() for x in (k, v))

        def run() -> torch.Tensor:
            out: torch.Tensor = FlashPrefill.apply(queries, keys, values, torch.empty_like(queries))
            return out

        return run, 2

    return prepare


RIVALS: dict[str, Callable[[], Prepare]] = {
    "minference": minference,
    "flexprefill": flexprefill,
    "xattention": xattention,
    "flashprefill": flashprefill,
}


def available(device: torch.device) -> tuple[dict[str, Prepare], dict[str, str]]:
    """(those that can be called here, why each other can't)."""
    found: dict[str, Prepare] = {}
    missing: dict[str, str] = {}
    for name, load in RIVALS.items():
        if device.type != "cuda":
            missing[name] = "needs a GPU"
            continue
        try:
            found[name] = load()
        except Exception as error:  # an import that builds code fails in many ways
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing


def _by_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """[1, heads, tokens, head_dim] each, KV repeated for its group."""
    group = q.shape[1] // k.shape[0]
    return q.transpose(0, 1)[None].contiguous(), *(x.repeat_interleave(group, 0)[None].contiguous() for x in (k, v))


def _heaviest_lines(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns [1, heads, vertical] and distances [1, heads, slash] with the largest mass of the last rows."""
    tokens, rows = q.shape[2], min(_ESTIMATED_ROWS, q.shape[2])
    scores = torch.einsum("bhrd,bhkd->bhrk", q[:, :, -rows:], k).float() * q.shape[3] ** -0.5
    row = torch.arange(tokens - rows, tokens, device=q.device)
    distance = row[:, None] - torch.arange(tokens, device=q.device)
    masses = scores.masked_fill(distance < 0, float("-inf")).softmax(-1)
    vertical = masses.sum(2)
    # The sinks and the nearest keys belong to every choice.
    vertical[..., :30] = float("inf")
    slash = torch.zeros_like(vertical).scatter_add_(
        2, distance.clamp(min=0).flatten().expand(*vertical.shape[:2], -1), masses.flatten(2)
    )
    slash[..., :100] = float("inf")
    columns = vertical.topk(min(_VERTICAL, tokens), -1).indices
    return columns, slash.topk(min(_SLASH, tokens), -1).indices
