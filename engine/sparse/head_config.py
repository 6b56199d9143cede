"""MInference's head configuration: for each layer and query head a pattern and its budget. Torch-free.

The file is theirs, unchanged: a list with one object a layer, `{"<head>": [type, vertical, slash, score]}`. For
`stream_llm` the two numbers are the tokens kept at the beginning and the local window; for `vertical_and_slash` the
vertical and slash budgets in tokens; for `block_sparse` the first is the number of key blocks.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3

from engine.errors import ModelError

Pattern = Literal["a_shape", "vertical_slash", "block_sparse"]
_PATTERNS: dict[str, Pattern] = {
    "stream_llm": "a_shape",
    "vertical_and_slash": "vertical_slash",
    "block_sparse": "block_sparse",
}
NAMES: dict[Pattern, str] = {pattern: name for name, pattern in _PATTERNS.items()}


@dataclass(frozen=True)
class HeadPattern:
    """One head's pattern with its two budgets, as the file has them."""

    pattern: Pattern
    first: int
    second: int


@dataclass(frozen=True)
class HeadConfig:
    """`layers[layer][head]`."""

    layers: tuple[tuple[HeadPattern, ...], ...]
    digest: str

    def check(self, *, num_layers: int, heads: int) -> None:
        """Raises ModelError where the configuration is another model's."""
        got = (len(self.layers), len(self.layers[0]))
        if got != (num_layers, heads) or any(len(layer) != heads for layer in self.layers):
            raise ModelError(
                f"the head config has {got[0]} layers of {got[1]} heads, the model {num_layers} layers of {heads} heads"
            )


def load_head_config(path: Path) -> HeadConfig:
    """Raises ModelError: unreadable, not MInference's format, an unknown pattern."""
    try:
        raw = path.read_bytes()
        parsed = json.loads(raw)
        layers = tuple(_layer(layer) for layer in parsed)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{path} is not a head config in MInference's format: {error!r}") from error
    if not layers or not layers[0]:
        raise ModelError(f"the head config {path} is empty")
    return HeadConfig(layers, blake3(raw).hexdigest())


def _layer(layer: dict[str, list[Any]]) -> tuple[HeadPattern, ...]:
    heads = []
    for head in range(len(layer)):
        kind, first, second = layer[str(head)][:3]
        if kind not in _PATTERNS:
            raise ValueError(f"unknown pattern {kind!r}, expected one of {', '.join(_PATTERNS)}")
        heads.append(HeadPattern(_PATTERNS[kind], int(first), int(second)))
    return tuple(heads)
