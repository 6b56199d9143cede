"""From records to tables, headline figures and a short printed table."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.fidelity.documents import ALL_TASKS, GROUPS
from loadtests.fidelity.paired import paired
from loadtests.fidelity.records import Record
from loadtests.fidelity.variants import DENSE, FP8_KV, LATE, NAMES
from loadtests.results import write_entry

COUNTED_SCORE = 0.5  # dense must reach it for a task's drop to say something
_HEADLINE = "default"
# What a trial's drop is, and the variants that measure it (earlier records have late questions under `default`).
TRIALS = {
    "late_question": ("question in the prompt − asked later", (LATE, _HEADLINE)),
    "second_question": ("second question in the prompt − asked later", (LATE,)),
    "fp8_kv": ("KV as computed − KV in FP8", (FP8_KV,)),
}


def build(records: Sequence[Record]) -> dict[str, Any]:
    """Everything that fidelity.json holds: one cell a (device, length, task), the pooled figures of each length."""
    cells: dict[tuple[str, int, str], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    compared = [record for record in records if record.variant in NAMES]
    for record in compared:
        cells[record.key.device, record.key.tokens, record.key.task][record.variant].append(record)
    order = sorted(cells, key=lambda cell: (cell[0], cell[1], ALL_TASKS.index(cell[2])))
    table = [_cell(*place, cells[place]) for place in order]
    lengths = sorted({(cell["device"], cell["tokens"]) for cell in table})
    pooled = [_pooled(device, tokens, compared, table) for device, tokens in lengths]
    pairs = [pair for trial in (_late_pairs, _second_pairs, _fp8_kv_pairs) for pair in trial(records)]
    return {"cells": table, "pooled": pooled, "needle_map": _needle_map(compared), "trials": _trials(pairs)}


def _cell(device: str, tokens: int, task: str, by_variant: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    dense = by_variant.get(DENSE, ())
    score = statistics.mean(_mean_score(record) for record in dense) if dense else None
    policies = {
        name: _against_dense(by_variant[name], dense) for name in NAMES if name != DENSE and by_variant.get(name)
    }
    return {
        "device": device,
        "tokens": tokens,
        "task": task,
        "counted": score is not None and score >= COUNTED_SCORE,
        "dense": None if not dense else {"score": score, "documents": len(dense), **_costs(dense)},
        "policies": policies,
    }


def _against_dense(records: Sequence[Record], dense: Sequence[Record]) -> dict[str, Any]:
    recalls = [record.recall for record in records if record.recall is not None]
    cell: dict[str, Any] = {
        "score": statistics.mean(map(_mean_score, records)),
        "documents": len(records),
        **_costs(records),
        "density": statistics.mean(record.density for record in records),
        "recall": statistics.mean(recall["mean"] for recall in recalls) if recalls else None,
        "recall_worst": min(recall["worst"] for recall in recalls) if recalls else None,
        "below_target_share": statistics.mean(recall["below_target"] for recall in recalls) if recalls else 0.0,
    }
    pairs = _pairs(records, dense)
    if pairs:
        drop = paired([_drop_points(*pair) for pair in pairs])
        nll = paired([_delta_nll(*pair) for pair in pairs])
        cell |= {"pairs": len(pairs), "drop_points": drop.mean, "drop_bound_points": drop.upper}
        cell |= {"delta_nll": nll.mean, "delta_nll_bound": nll.upper}
    return cell


def _costs(records: Sequence[Record]) -> dict[str, float]:
    return {
        "nll": statistics.mean(statistics.mean(record.nlls) for record in records),
        "prefill_s": statistics.median(record.prefill_s for record in records),
        "answer_s": statistics.median(record.answer_s for record in records),
    }


def _pooled(device: str, tokens: int, records: Sequence[Record], table: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over the documents of all tasks that count."""
    here = [cell for cell in table if cell["device"] == device and cell["tokens"] == tokens]
    counted = {cell["task"] for cell in here if cell["counted"]}
    mine = [record for record in records if record.key.device == device and record.key.tokens == tokens]
    dense = [record for record in mine if record.variant == DENSE]
    policies: dict[str, Any] = {}
    for name in NAMES:
        pairs = _pairs([record for record in mine if record.variant == name], dense)
        drops = [_drop_points(*pair) for pair in pairs if pair[0].key.task in counted]
        if name == DENSE or not drops:
            continue
        drop, nll = paired(drops), paired([_delta_nll(*pair) for pair in pairs])
        bounds = {
            cell["task"]: cell["policies"][name]["drop_bound_points"]
            for cell in here
            if cell["counted"] and cell["policies"].get(name, {}).get("drop_bound_points") is not None
        }
        policies[name] = {
            "drop_points": drop.mean,
            "drop_bound_points": drop.upper,
            "delta_nll": nll.mean,
            "worst_delta_nll": max(cell["policies"][name]["delta_nll"] for cell in here if _has_nll(cell, name)),
            "documents": drop.documents,
            "task_bounds": bounds,
        }
    return {
        "device": device,
        "tokens": tokens,
        "counted_ruler": sorted(counted & set(GROUPS["ruler"]), key=ALL_TASKS.index),
        "counted": sorted(counted, key=ALL_TASKS.index),
        "policies": policies,
    }


def _has_nll(cell: Mapping[str, Any], name: str) -> bool:
    return "delta_nll" in cell["policies"].get(name, {})


def _needle_map(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Mean score at each depth."""
    found: dict[tuple[str, int, str, int], list[list[float]]] = defaultdict(list)
    for record in records:
        if record.key.task == "needle_map":
            key = record.key
            found[key.device, key.tokens, record.variant, key.questions].append(record.scores)
    return [
        {
            "device": device,
            "tokens": tokens,
            "variant": variant,
            "depths": [(i + 0.5) / questions for i in range(questions)],
            "scores": [statistics.mean(column) for column in zip(*rows, strict=True)],
            "documents": len(rows),
        }
        for (device, tokens, variant, questions), rows in sorted(found.items())
    ]


@dataclass(frozen=True)
class _Pair:
    """One document's questions asked in two ways, the first of which is what the other should not fall behind."""

    trial: str  # a key of TRIALS
    record: Record  # of the document
    scores: tuple[Sequence[float], Sequence[float]]
    nlls: tuple[Sequence[float], Sequence[float]]  # () where they were not measured


def _late_pairs(records: Iterable[Record]) -> Iterator[_Pair]:
    """With the question in the prompt, and asked later."""
    for record in records:
        if asked := len(record.in_prompt_scores):
            later = record.nlls[: len(record.in_prompt_nlls)]
            yield _Pair(
                "late_question",
                record,
                (record.in_prompt_scores, record.scores[:asked]),
                (record.in_prompt_nlls, later),
            )


def _second_pairs(records: Iterable[Record]) -> Iterator[_Pair]:
    """The same of a conversation's second question."""
    for record in records:
        if record.second_scores:
            yield _Pair(
                "second_question",
                record,
                (record.second_in_prompt_scores, record.second_scores),
                (record.second_in_prompt_nlls, record.second_nlls),
            )


def _fp8_kv_pairs(records: Sequence[Record]) -> Iterator[_Pair]:
    """With KV as the model computes it, and in FP8."""
    fp8, own = ([record for record in records if record.variant == name] for name in (FP8_KV, _HEADLINE))
    for record, other in _pairs(fp8, own):
        yield _Pair("fp8_kv", record, (other.scores, record.scores), (other.nlls, record.nlls))


def _trials(pairs: Iterable[_Pair]) -> list[dict[str, Any]]:
    """One entry a (trial, length, device): the drop in points over the documents of the tasks that count, those where
    the first way of asking scores at least COUNTED_SCORE; ΔNLL over all documents."""
    groups: dict[tuple[str, int, str], list[_Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.trial, pair.record.key.tokens, pair.record.key.device].append(pair)
    return [_trial(*place, found) for place, found in sorted(groups.items())]


def _trial(trial: str, tokens: int, device: str, pairs: Sequence[_Pair]) -> dict[str, Any]:
    reached: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        reached[pair.record.key.task].append(statistics.mean(pair.scores[0]))
    tasks = [task for task in ALL_TASKS if task in reached and statistics.mean(reached[task]) >= COUNTED_SCORE]
    counted = [pair for pair in pairs if pair.record.key.task in tasks]
    drops = [100 * (statistics.mean(pair.scores[0]) - statistics.mean(pair.scores[1])) for pair in counted]
    nlls = [statistics.mean(pair.nlls[1]) - statistics.mean(pair.nlls[0]) for pair in pairs if pair.nlls[0]]
    drop, nll = (paired(found) if found else None for found in (drops, nlls))
    return {
        "trial": trial,
        "tokens": tokens,
        "device": device,
        "tasks": tasks,
        "documents": len(counted),
        "questions": sum(len(pair.scores[0]) for pair in counted),
        "drop_points": drop.mean if drop else None,
        "drop_bound_points": drop.upper if drop else None,
        "delta_nll": nll.mean if nll else None,
        "delta_nll_bound": nll.upper if nll else None,
    }


def _pairs(records: Sequence[Record], dense: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The same documents with the same questions."""

    def same(record: Record) -> tuple[str, str, int, int, int]:
        key = record.key
        return key.device, key.task, key.tokens, key.questions, key.index

    reference = {same(record): record for record in dense}
    return [(record, reference[same(record)]) for record in records if same(record) in reference]


def _mean_score(record: Record) -> float:
    return statistics.mean(record.scores)


def _drop_points(record: Record, dense: Record) -> float:
    return 100 * (_mean_score(dense) - _mean_score(record))


def _delta_nll(record: Record, dense: Record) -> float:
    return statistics.mean(record.nlls) - statistics.mean(dense.nlls)


def write_summary(table: Mapping[str, Any], records: Sequence[Record], *, summary: Path) -> None:
    """The headline figures of every length, a trial's of its longest. A bound needs two documents of a task."""
    for pooled in table["pooled"]:
        size = f"{pooled['tokens'] // 1024}k"
        origin = _origin(records, pooled["device"], pooled["tokens"])
        shared: dict[str, Any] = {"device": pooled["device"], "summary": summary, **origin}
        names = pooled["counted_ruler"]
        dense = [cell for cell in table["cells"] if cell["dense"] is not None]
        ruler = [task for task in GROUPS["ruler"] if any(_is_cell(cell, pooled, task) for cell in dense)]
        if ruler:
            write_entry(
                f"tasks_counted_{size}",
                len(names),
                f"of {len(ruler)} tasks",
                better="higher",
                samples=[len(names)],
                tasks=names,
                **shared,
            )
        found = pooled["policies"].get(_HEADLINE)
        if found is None:
            continue
        write_entry(
            f"pooled_drop_{size}",
            found["drop_points"],
            "points",
            better="lower",
            samples=[found["drop_points"]],
            bound=found["drop_bound_points"],
            documents=found["documents"],
            tasks=pooled["counted"],
            **shared,
        )
        if found["task_bounds"]:
            worst = max(found["task_bounds"], key=found["task_bounds"].__getitem__)
            write_entry(
                f"worst_task_drop_bound_{size}",
                found["task_bounds"][worst],
                "points",
                better="lower",
                samples=list(found["task_bounds"].values()),
                task=worst,
                tasks=list(found["task_bounds"]),
                **shared,
            )
        write_entry(
            f"worst_task_delta_nll_{size}",
            found["worst_delta_nll"],
            "nats/token",
            better="lower",
            samples=[found["worst_delta_nll"]],
            pooled=found["delta_nll"],
            **shared,
        )
    longest = {found["trial"]: found for found in table["trials"] if found["drop_bound_points"] is not None}
    for trial, found in longest.items():
        write_entry(
            f"{trial}_drop_points",
            found["drop_points"],
            "points",
            better="lower",
            samples=[found["drop_points"]],
            bound=found["drop_bound_points"],
            **{name: found[name] for name in ("delta_nll", "documents", "questions", "tasks", "tokens", "device")},
            summary=summary,
            **_origin(
                [record for record in records if record.variant in TRIALS[trial][1]], found["device"], found["tokens"]
            ),
        )


def _is_cell(cell: Mapping[str, Any], pooled: Mapping[str, Any], task: str) -> bool:
    return bool(cell["device"] == pooled["device"] and cell["tokens"] == pooled["tokens"] and cell["task"] == task)


def _origin(records: Iterable[Record], device: str, tokens: int) -> dict[str, Any]:
    """Command, versions, commit and date of the last of these records: a report may be made on another machine."""
    last = max(
        (record for record in records if record.key.device == device and record.key.tokens == tokens),
        key=lambda record: record.date,
    )
    origin = {"command": last.command, "versions": last.versions, "date": last.date}
    return origin | ({"commit": last.commit} if last.commit else {})


def write(table: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def printed(table: Mapping[str, Any]) -> str:
    """Task by task: dense score, then of each policy score, drop with its bound, ΔNLL, density, seconds."""
    lines = []
    for pooled in table["pooled"]:
        here = [cell for cell in table["cells"] if _is_cell(cell, pooled, cell["task"])]
        lines.append(f"\n{pooled['tokens']} tokens, {pooled['device']}")
        lines.append(f"{'task':22} {'variant':15} {'docs':>4} {'score':>6} {'drop':>6} {'bound':>6} {'ΔNLL':>7} "
                     f"{'density':>7} {'prefill':>8}")  # fmt: skip
        for cell in here:
            dense, mark = cell["dense"], "" if cell["counted"] else " (not counted)"
            if dense is not None:
                lines.append(f"{cell['task']:22} {DENSE:15} {dense['documents']:4} {dense['score']:6.3f} "
                             f"{'':6} {'':6} {'':7} {1:7.2f} {dense['prefill_s']:7.2f}s{mark}")  # fmt: skip
            for name, found in cell["policies"].items():
                lines.append(f"{'':22} {name:15} {found['documents']:4} {found['score']:6.3f} "
                             f"{_number(found.get('drop_points')):>6} {_number(found.get('drop_bound_points')):>6} "
                             f"{_number(found.get('delta_nll'), 3):>7} {found['density']:7.2f} "
                             f"{found['prefill_s']:7.2f}s")  # fmt: skip
        for name, found in pooled["policies"].items():
            lines.append(f"{'pooled':22} {name:15} {found['documents']:4} {'':6} {_number(found['drop_points']):>6} "
                         f"{_number(found['drop_bound_points']):>6} {_number(found['delta_nll'], 3):>7}")  # fmt: skip
        ruler = pooled["counted_ruler"]
        lines.append(f"{len(ruler)} of RULER's {len(GROUPS['ruler'])} tasks count (dense ≥ {COUNTED_SCORE:.0%})")
    for found in table["trials"]:
        lines.append(f"{TRIALS[found['trial']][0]}, {found['tokens']} tokens, {found['device']}: "
                     f"{_number(found['drop_points'])} points, bound {_number(found['drop_bound_points'])}, "
                     f"ΔNLL {_number(found['delta_nll'], 3)}, {found['questions']} questions, "
                     f"{found['documents']} documents of {len(found['tasks'])} tasks")  # fmt: skip
    return "\n".join(lines)


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
