"""`foreword profile`: each head's best fixed pattern on a text, as a head config in MInference's format."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from engine.engine import load_tokenizer
from engine.model import load_model
from engine.model_folder import resolve_model
from engine.sparse.head_config import NAMES
from engine.sparse.profile import ProfiledHead, profile_heads
from service.settings import Settings

_console = Console(stderr=True)


def profile_command(model: str, text: Path, *, out: Path, tokens: int, budget: int, settings: Settings) -> None:
    """Write `out`. Raises ModelError, InvalidRequest (a text too short for the budget), OSError."""
    written = text.read_text(encoding="utf-8", errors="replace")
    with _console.status("loading the model"):
        folder = resolve_model(model, cache_dir=settings.cache_dir)
        # Exact unless speed is asked for: a head config is made once.
        dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
        loaded = load_model(folder, dtype=dtype)
        ids = load_tokenizer(folder).encode(written, add_special_tokens=False).ids[:tokens]
    with Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(40),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=_console,
    ) as bars:
        bar = bars.add_task("profile", total=1.0)
        layers = profile_heads(
            loaded,
            np.asarray(ids, dtype=np.uint32),
            budget=budget,
            progress=lambda fraction: bars.update(bar, completed=fraction),
        )
    out.write_text(as_head_config(layers), encoding="utf-8")
    _console.print(_summary(layers, len(ids), out), highlight=False)


def as_head_config(layers: list[list[ProfiledHead]]) -> str:
    """MInference's JSON: a list with one object a layer, {"<head>": [type, vertical, slash, score]}."""
    rows = [
        {
            str(head): [NAMES[found.pattern.pattern], found.pattern.first, found.pattern.second, round(found.recall, 6)]
            for head, found in enumerate(layer)
        }
        for layer in layers
    ]
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"


def _summary(layers: list[list[ProfiledHead]], num_tokens: int, out: Path) -> str:
    heads = [head for layer in layers for head in layer]
    counts = Counter(head.pattern.pattern for head in heads)
    recalls = [head.recall for head in heads]
    return (
        f"{num_tokens:,} tokens, {len(heads)} heads: "
        + ", ".join(f"{count} {pattern}" for pattern, count in counts.most_common())
        + f" · recall mean {np.mean(recalls):.3f}, p5 {np.quantile(recalls, 0.05):.3f}, worst {min(recalls):.3f}"
        + f" · written to {out}"
    )
