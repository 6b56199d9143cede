"""Policies on the default model's real queries and keys: output error and recall against time and density.

    python -m loadtests.fidelity.compare --lengths 16384 --layers 0,9,19,29            # on a CPU: some layers
    python -m loadtests.fidelity.compare --lengths 32768,65536,131072 --device cuda

A real document goes through the model densely; each layer's queries, keys and values are then attended to by every
policy at several budgets, and by the public kernels of others where they are installed. Error is the Frobenius norm of
the difference to dense attention over that of dense attention; recall the kept softmax mass of every row. Results:
loadtests/results/compare.json, compare.png, summary.json.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from engine.threads import share_cores

share_cores()

import torch  # noqa: E402 (threads first)

from engine.chain import segment_chain  # noqa: E402
from engine.engine import load_tokenizer  # noqa: E402
from engine.model import Model  # noqa: E402
from engine.model_folder import resolve_model  # noqa: E402
from engine.sparse.report import AttentionReport  # noqa: E402
from engine.sparse.settings import SparseSettings  # noqa: E402
from kernels.dense_attention import dense_attention  # noqa: E402
from loadtests.fidelity.inside import model_of, settings_of  # noqa: E402
from loadtests.fidelity.layers import LayerQKV, attend_as_the_engine, walk, watched  # noqa: E402
from loadtests.fidelity.plots import plot_compare  # noqa: E402
from loadtests.fidelity.rivals import Prepare, available  # noqa: E402
from loadtests.fidelity.variants import Engines, Variant  # noqa: E402
from loadtests.haystack import haystack  # noqa: E402
from loadtests.results import cpu_name, write_entry  # noqa: E402

RESULTS = Path(__file__).resolve().parent.parent / "results"
DENSE = "dense"
_ROWS = 4096  # compared at a time


@dataclass(frozen=True)
class Contender:
    """One of our policies with a budget; the larger, the more is kept."""

    policy: str
    budget: str
    settings: SparseSettings


@dataclass(frozen=True)
class Point:
    """One contender on one layer. `recall` and `density` are None where a foreign kernel does not tell."""

    policy: str
    budget: str
    layer: int
    seconds: float
    error: float
    recall: float | None
    density: float | None


def contenders(base: SparseSettings) -> list[Contender]:
    """Each policy at its default budget and around it."""
    found = [
        Contender("a_shape", f"{local} local", replace(base, policy="a_shape", a_shape_local=local))
        for local in (1024, 4096, 16384)
    ]
    found += [
        Contender(
            "vertical_slash",
            f"{vertical} + {slash}",
            replace(base, policy="vertical_slash", vertical_tokens=vertical, slash_tokens=slash),
        )
        for vertical, slash in ((500, 3048), (1000, 6096), (2000, 12192))
    ]
    found += [
        Contender(
            "block_sparse",
            f"{tokens} tokens",
            replace(base, policy="block_sparse", top_blocks=tokens // base.key_block),
        )
        for tokens in (2048, 6400, 12800)
    ]
    found += [
        Contender("adaptive", f"target {target}", replace(base, policy="adaptive", target=target))
        for target in (0.8, 0.9, 0.95, 0.99)
    ]
    return found


@torch.inference_mode()
def compare(
    model: Model,
    tokens: Any,
    found: Sequence[Contender],
    rivals: dict[str, Prepare],
    *,
    digest: str,
    layers: Sequence[int],
    repeats: int = 1,
    deadline: float = float("inf"),
) -> list[Point]:
    """Points of every wanted layer; the document goes on densely. Ends early at `deadline` (`time.monotonic`)."""
    chain = segment_chain(tokens, salt=b"compare", digest=digest)
    points: list[Point] = []
    for qkv in walk(model, tokens, chain, num_layers=max(layers) + 1):
        if qkv.layer not in layers:
            qkv.out.copy_(dense_attention(qkv.q, qkv.k, qkv.v)[0])
            continue
        seconds, (dense, everything) = _timed(partial(dense_attention, qkv.q, qkv.k, qkv.v), model, repeats)
        qkv.out.copy_(dense)
        points.append(Point(DENSE, "", qkv.layer, seconds, 0.0, 1.0, 1.0))
        out = torch.empty_like(qkv.out)
        for contender in found:
            points.append(_ours(qkv, contender, dense, everything, out, model, repeats))
        for name, prepare in list(rivals.items()):
            point = _theirs(qkv, name, prepare, dense, model, repeats)
            if point is None:
                del rivals[name]
            else:
                points.append(point)
        if time.monotonic() > deadline:
            print(f"the time is used up behind layer {qkv.layer}", flush=True)
            break
    return points


def _ours(
    qkv: LayerQKV,
    contender: Contender,
    dense: torch.Tensor,
    everything: torch.Tensor,
    out: torch.Tensor,
    model: Model,
    repeats: int,
) -> Point:
    report = AttentionReport()
    with watched(model.device, timed=False) as watch:

        def run() -> None:
            nonlocal report
            report, watch.kept = AttentionReport(), []
            attend_as_the_engine(list(qkv.tasks(out)), contender.settings, report)

        seconds, _ = _timed(run, model, repeats)
    kept = everything.clone()
    for first, lse in watch.kept:
        kept[first : first + len(lse)] = lse
    recall = float((kept - everything).double().exp().clamp(max=1.0).mean())
    error = relative_error(out, dense)
    return Point(contender.policy, contender.budget, qkv.layer, seconds, error, recall, report.density)


def _theirs(
    qkv: LayerQKV, name: str, prepare: Prepare, dense: torch.Tensor, model: Model, repeats: int
) -> Point | None:
    """None, with the reason printed, where the kernel fails."""
    try:
        run, heads_axis = prepare(qkv.q, qkv.k, qkv.v)
        seconds, out = _timed(run, model, repeats)
    except Exception as error:  # somebody else's code
        print(f"passed over from here on: {name}: {type(error).__name__}: {error}", flush=True)
        return None
    rows = out[0].transpose(0, 1) if heads_axis == 1 else out[0]
    return Point(name, "default", qkv.layer, seconds, relative_error(rows[: len(dense)], dense), None, None)


def _timed(run: Callable[[], Any], model: Model, repeats: int) -> tuple[float, Any]:
    """(least seconds, last result)."""
    best, result = float("inf"), None
    for _ in range(repeats):
        _wait(model)
        started = time.perf_counter()
        result = run()
        _wait(model)
        best = min(best, time.perf_counter() - started)
    return best, result


def _wait(model: Model) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def relative_error(out: torch.Tensor, dense: torch.Tensor) -> float:
    """‖out − dense‖ / ‖dense‖ over [tokens, heads, head_dim], in float64 sums."""
    difference = norm = 0.0
    for first in range(0, len(dense), _ROWS):
        want = dense[first : first + _ROWS].float()
        difference += float((out[first : first + _ROWS].float() - want).square().sum(dtype=torch.float64))
        norm += float(want.square().sum(dtype=torch.float64))
    return math.sqrt(difference / norm)


def summarise(points: Sequence[Point]) -> list[dict[str, Any]]:
    """One entry a contender over its layers: seconds added up, the rest averaged; `speedup` against dense."""
    dense = {point.layer: point.seconds for point in points if point.policy == DENSE}
    places = dict.fromkeys((point.policy, point.budget) for point in points)
    entries = []
    for policy, budget in places:
        mine = [point for point in points if (point.policy, point.budget) == (policy, budget)]
        seconds = sum(point.seconds for point in mine)
        entries.append(
            {
                "policy": policy,
                "budget": budget,
                "layers": len(mine),
                "seconds": seconds,
                "speedup": sum(dense[point.layer] for point in mine) / seconds,
                "error": mean(point.error for point in mine),
                "worst_error": max(point.error for point in mine),
                "recall": _known([point.recall for point in mine]),
                "density": _known([point.density for point in mine]),
            }
        )
    return entries


def _known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    deadline = time.monotonic() + options.budget_s
    folder = resolve_model(options.model, cache_dir=options.cache_dir)
    tokenizer = load_tokenizer(folder)
    with tempfile.TemporaryDirectory() as kv:
        engine = Engines(folder, Path(kv), device=options.device, threads=options.threads).of(Variant.named("default"))
    model = model_of(engine)
    rivals, missing = available(model.device)
    for name, reason in missing.items():
        print(f"passed over: {name}: {reason}", flush=True)
    layers = options.layers or list(range(model.spec.num_layers))
    device = torch.cuda.get_device_name() if engine.device == "cuda" else cpu_name()
    lengths = []
    for length in options.lengths:
        if time.monotonic() > deadline:
            break
        points = compare(
            model,
            haystack(tokenizer, length, needles=10).prefix,
            contenders(settings_of(engine)),
            rivals,
            digest=engine.digest("default"),
            layers=layers,
            repeats=options.repeats or (2 if engine.device == "cuda" else 1),
            deadline=deadline,
        )
        lengths.append(
            {"tokens": length, "contenders": summarise(points), "points": [asdict(point) for point in points]}
        )
        print(printed(lengths[-1]), flush=True)
    report = {"device": device, "layers": layers, "missing": missing, "lengths": lengths}
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "compare.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot_compare(report, options.results / "compare.png")
    for found in lengths:
        _write_entry(found, device, options)
    return 0


def _write_entry(found: dict[str, Any], device: str, options: argparse.Namespace) -> None:
    """The default target's attention against dense, guard and choice included."""
    by_name = {(entry["policy"], entry["budget"]): entry for entry in found["contenders"]}
    entry = by_name["adaptive", "target 0.95"]
    layers = "" if options.layers is None else f" --layers {','.join(map(str, options.layers))}"
    write_entry(
        f"attention_speedup_probe_{found['tokens'] // 1024}k",
        entry["speedup"],
        "ratio",
        better="higher",
        samples=[
            dense["seconds"] / point["seconds"]
            for point, dense in zip(
                [point for point in found["points"] if point["budget"] == "target 0.95"],
                [point for point in found["points"] if point["policy"] == DENSE],
                strict=True,
            )
        ],
        command=f"python -m loadtests.fidelity.compare --lengths {found['tokens']}{layers}",
        device=device,
        summary=options.results / "summary.json",
        error=entry["error"],
        recall=entry["recall"],
        density=entry["density"],
        layers=entry["layers"],
    )


def printed(found: dict[str, Any]) -> str:
    lines = [
        f"\n{found['tokens']} tokens",
        f"{'policy':16}{'budget':16}{'seconds':>9}{'faster':>8}{'error':>8}{'recall':>8}{'density':>9}",
    ]
    for entry in found["contenders"]:
        recall, density = ("–" if entry[name] is None else f"{entry[name]:.3f}" for name in ("recall", "density"))
        lines.append(
            f"{entry['policy']:16}{entry['budget']:16}{entry['seconds']:9.3f}{entry['speedup']:7.2f}×{entry['error']:8.4f}"
            f"{recall:>8}{density:>9}"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(item) for item in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=numbers, default=[16384])
    parser.add_argument("--layers", type=numbers, help="which ones are compared; all of them otherwise")
    parser.add_argument("--repeats", type=int, default=0, help="the fastest counts; 0: 1 on a CPU, 2 on a GPU")
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--model", default="default")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/foreword").expanduser())
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
