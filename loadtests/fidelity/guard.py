"""The fidelity guard against the truth: what it says was kept, what was kept, and what saying it costs.

    python -m loadtests.fidelity.guard --length 32768 --documents 3
    python -m loadtests.fidelity.guard --device cuda --length 131072 --budget-s 120

For every (layer, segment, KV-head group) that stays sparse, the recall of the record (witness rows) stands beside the
mean over all rows. Documents: source code, and such that no fixed budget suits: a needle in repeated text, a table of
numbers, text of random words. Results: loadtests/results/guard.json, guard.png, summary.json.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.threads import share_cores

share_cores()

import numpy as np  # noqa: E402 (threads first)
import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from engine.chain import TokenIds, segment_chain  # noqa: E402
from engine.engine import load_tokenizer  # noqa: E402
from engine.model import Model  # noqa: E402
from engine.model_folder import resolve_model  # noqa: E402
from engine.sparse.report import AttentionReport  # noqa: E402
from engine.sparse.settings import SparseSettings, for_fidelity  # noqa: E402
from engine.sparse.task import SegmentTask  # noqa: E402
from kernels.dense_attention import dense_attention  # noqa: E402
from loadtests.fidelity.inside import model_of, settings_of  # noqa: E402
from loadtests.fidelity.layers import GUARD, attend_as_the_engine, walk, watched  # noqa: E402
from loadtests.fidelity.plots import plot_guard  # noqa: E402
from loadtests.fidelity.tasks import NOISE, fit  # noqa: E402
from loadtests.fidelity.variants import Engines, Variant  # noqa: E402
from loadtests.fidelity.words import ADJECTIVES, NOUNS, number  # noqa: E402
from loadtests.haystack import real_text  # noqa: E402
from loadtests.results import cpu_name, write_entry  # noqa: E402

RESULTS = Path(__file__).resolve().parent.parent / "results"
KINDS = ("source", "needle_in_noise", "number_table", "random_words")
_DENSE = 1 - 1e-5  # a true recall from here on is a group that went dense


@dataclass(frozen=True)
class Cell:
    """One (layer, segment, KV-head group) that stayed sparse."""

    layer: int
    start: int
    group: int
    predicted: float
    true: float


@dataclass
class Calibration:
    """One document: its cells, what was said of it, seconds by part of the prefill."""

    kind: str
    tokens: int
    target: float
    cells: list[Cell]
    density: float
    density_by_layer: list[float]
    patterns: dict[str, int]
    below_target: bool
    seconds: dict[str, float]

    @property
    def guard_share(self) -> float:
        return self.seconds.get(GUARD, 0.0) / sum(self.seconds.values())

    def cells_short(self, margin: float) -> int:
        """How many truly kept less than the target, beyond `margin`."""
        return sum(cell.true < self.target - margin for cell in self.cells)


def make_tokens(kind: str, tokenizer: Tokenizer, num_tokens: int, seed: int) -> TokenIds:
    """Exactly `num_tokens` of one kind of document. Raises ValueError for another kind."""
    rng = random.Random(f"{kind}/{seed}")
    if kind == "source":
        return real_text(tokenizer, num_tokens, seed=seed)[:num_tokens]
    pieces: dict[str, Callable[[], str]] = {
        "needle_in_noise": lambda: NOISE + " ",
        "number_table": lambda: ",".join(number(rng) for _ in range(6)) + "\n",
        "random_words": lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} ",
    }
    if kind not in pieces:
        raise ValueError(f"unknown kind of document {kind!r}, expected one of {', '.join(KINDS)}")

    def encode(text: str) -> TokenIds:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    needle = encode(f" One of the special magic numbers for tidy-harbor is: {number(rng)}. ")
    room = num_tokens - (len(needle) if kind == "needle_in_noise" else 0)
    drawn = [pieces[kind]() for _ in range(room)]
    text, _ = fit(lambda size: "".join(drawn[:size]), room, lambda text: len(encode(text)))
    # `fit` stays under the length; the text's own beginning fills what is missing.
    ids = np.resize(encode(text), room)
    if kind != "needle_in_noise":
        return ids
    middle = room // 2
    return np.concatenate([ids[:middle], needle, ids[middle:]])


@torch.inference_mode()
def calibrate(
    model: Model,
    settings: SparseSettings,
    tokens: TokenIds,
    *,
    kind: str,
    digest: str = "guard",
    num_layers: int | None = None,
) -> Calibration:
    """A prefill under `settings`, with the true recall of every row computed beside it."""
    chain = segment_chain(tokens, salt=b"guard", digest=digest)
    report, cells, kept_by_layer = AttentionReport(), [], []
    with watched(model.device) as watch:
        for qkv in walk(model, tokens, chain, num_layers=num_layers, watch=watch):
            tasks, watch.kept = list(qkv.tasks(qkv.out)), []
            known = [len(_recalls(report, task.start)) for task in tasks]
            with watch.timing("other"):
                attend_as_the_engine(tasks, settings, report)
            kept = qkv.q.new_full(qkv.q.shape[:2], float("nan"), dtype=torch.float32)
            for first, lse in watch.kept:
                kept[first : first + len(lse)] = lse
            for task, before in zip(tasks, known, strict=True):
                rows = kept[task.start : task.start + task.rows]
                if not rows.isnan().any():
                    cells += _cells(task, _recalls(report, task.start)[before:], rows)
            kept_by_layer.append(_pairs(report))
    pairs = np.diff(np.array([(0.0, 0.0), *kept_by_layer]), axis=0)
    return Calibration(
        kind=kind,
        tokens=len(tokens),
        target=settings.target,
        cells=cells,
        density=report.density,
        density_by_layer=(pairs[:, 0] / pairs[:, 1]).tolist(),
        patterns=report.heads(),
        below_target=report.below_target,
        seconds=watch.seconds,
    )


def _recalls(report: AttentionReport, start: int) -> list[float]:
    segment = report.segments.get(str(start))
    return [] if segment is None else segment.recalls


def _pairs(report: AttentionReport) -> tuple[float, float]:
    """(kept, all) causal pairs so far."""
    segments = report.segments.values()
    return sum(segment.kept_pairs for segment in segments), sum(segment.all_pairs for segment in segments)


def _cells(task: SegmentTask, predicted: Sequence[float], kept: torch.Tensor) -> list[Cell]:
    """Said against true, group by group. kept [rows, heads]: log-sum-exp of the kept keys."""
    _, everything = dense_attention(task.q, task.k, task.v, row_offset=task.start)
    shares = (kept - everything).double().exp().clamp(max=1.0)
    true = shares.view(task.rows, task.kv_heads, -1).mean((0, 2)).tolist()
    groups = list(range(task.kv_heads))
    if len(predicted) != len(true):  # on a GPU groups that went dense say nothing
        groups = [group for group in groups if true[group] < _DENSE]
        if len(groups) != len(predicted):
            raise RuntimeError(
                f"{len(predicted)} recalls were reported, {len(groups)} of {len(true)} groups are sparse"
            )
    return [
        Cell(task.layer, task.start, group, said, true[group]) for group, said in zip(groups, predicted, strict=True)
    ]


def summarise(found: Sequence[Calibration]) -> dict[str, Any]:
    """Errors by cell and by head (a KV-head group of one layer, mean over its segments), and one entry a document."""
    cells = [cell.predicted - cell.true for one in found for cell in one.cells]
    heads = [error for one in found for error in head_errors(one.cells)]
    return {
        "documents": [
            {
                "kind": one.kind,
                "tokens": one.tokens,
                "target": one.target,
                "density": one.density,
                "density_by_layer": one.density_by_layer,
                "patterns": one.patterns,
                "below_target": one.below_target,
                "cells": len(one.cells),
                "true_recall_mean": _mean([cell.true for cell in one.cells]),
                "true_recall_worst": min((cell.true for cell in one.cells), default=None),
                "cells_short": one.cells_short(0.0),
                "cells_short_by_0.02": one.cells_short(0.02),
                "guard_share": one.guard_share,
                "seconds": one.seconds,
            }
            for one in found
        ],
        "cell_error": _error(cells),
        "head_error": _error(heads),
        "guard_share": _mean([one.guard_share for one in found]),
    }


def head_errors(cells: Sequence[Cell]) -> list[float]:
    """Said less true recall of each (layer, group), over its segments."""
    by_head: dict[tuple[int, int], list[float]] = defaultdict(list)
    for cell in cells:
        by_head[cell.layer, cell.group].append(cell.predicted - cell.true)
    return [float(np.mean(errors)) for errors in by_head.values()]


def _error(errors: Sequence[float]) -> dict[str, float] | None:
    if not errors:
        return None
    size = np.abs(errors)
    return {
        "count": len(errors),
        "bias": float(np.mean(errors)),
        "p50": float(np.quantile(size, 0.5)),
        "p95": float(np.quantile(size, 0.95)),
        "worst": float(size.max()),
        "within_0.01": float((size <= 0.01).mean()),
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    deadline = time.monotonic() + options.budget_s
    folder = resolve_model(options.model, cache_dir=options.cache_dir)
    tokenizer = load_tokenizer(folder)
    with tempfile.TemporaryDirectory() as kv:
        engine = Engines(folder, Path(kv), device=options.device, threads=options.threads).of(Variant.named("default"))
    settings = for_fidelity(settings_of(engine), options.fidelity)
    found: list[Calibration] = []
    longest = 0.0
    for seed in range(options.documents):
        for kind in options.kinds:
            started = time.monotonic()
            if started + longest > deadline:
                print("the time is used up", flush=True)
                break
            tokens = make_tokens(kind, tokenizer, options.length, seed)
            digest = engine.digest(options.fidelity)
            found.append(calibrate(model_of(engine), settings, tokens, kind=kind, digest=digest))
            longest = max(longest, time.monotonic() - started)
            print(_line(found[-1]), flush=True)
    if not found:
        print("nothing was measured")
        return 1
    device = torch.cuda.get_device_name() if engine.device == "cuda" else cpu_name()
    summary = {"device": device, "fidelity": options.fidelity, **summarise(found)}
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "guard.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    plot_guard(found, options.results / "guard.png")
    _write_entries(summary, options, device)
    if summary["head_error"] is not None:
        heads, cells, share = summary["head_error"], summary["cell_error"], summary["guard_share"]
        print(
            f"said − true recall: heads p95 {heads['p95']:.4f} ({heads['within_0.01']:.1%} within 0.01), bias "
            f"{heads['bias']:+.4f}; cells p95 {cells['p95']:.4f}; guard {share:.1%} of the prefill"
        )
    return 0


def _write_entries(summary: dict[str, Any], options: argparse.Namespace, device: str) -> None:
    command = f"python -m loadtests.fidelity.guard --length {options.length} --documents {options.documents}"
    shared: dict[str, Any] = {
        "command": command,
        "device": device,
        "summary": options.results / "summary.json",
        "tokens": options.length,
        "documents": len(summary["documents"]),
    }
    shares = [one["guard_share"] for one in summary["documents"]]
    write_entry("guard_cost_share", summary["guard_share"], "of prefill", better="lower", samples=shares, **shared)
    if summary["head_error"] is not None:
        write_entry(
            "guard_error_p95",
            summary["head_error"]["p95"],
            "recall, by head",
            better="lower",
            samples=[summary["head_error"]["p95"]],
            cells_p95=summary["cell_error"]["p95"],
            bias=summary["head_error"]["bias"],
            **shared,
        )


def _line(one: Calibration) -> str:
    said = "says below_target" if one.below_target else "no below_target"
    if not one.cells:
        return f"{one.tokens} {one.kind}: every group dense, {said}"
    true = [cell.true for cell in one.cells]
    return (
        f"{one.tokens} {one.kind}: density {one.density:.2f}, {len(one.cells)} sparse cells, true recall mean "
        f"{np.mean(true):.3f} worst {min(true):.3f}, {one.cells_short(0.02)} short by over 0.02, {said}, "
        f"guard {one.guard_share:.1%} of the prefill"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--documents", type=int, default=1, help="of each kind")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--fidelity", default="default", choices=("default", "strict", "fast"))
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--model", default="default")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/foreword").expanduser())
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
