"""Pictures of the reports."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MIB = 1 << 20


def plot_soak(record: Mapping[str, Any], path: Path) -> None:
    """Memory, handles, threads and disk over the minutes awake, with the kills."""
    samples = record["samples"]
    figure, rows = plt.subplots(4, 1, figsize=(9, 11), sharex=True, layout="constrained")
    for process in ("api", "worker"):
        known = [sample for sample in samples if sample[process] is not None]
        minutes = [sample["at_s"] / 60 for sample in known]
        for axes, field, scale in zip(rows, ("rss_bytes", "handles", "threads"), (MIB, 1, 1), strict=False):
            axes.plot(minutes, [sample[process][field] / scale for sample in known], ".-", ms=2, lw=0.8, label=process)
    minutes = [sample["at_s"] / 60 for sample in samples]
    for name in ("kv", "uploads", "documents", "resume"):
        rows[3].plot(minutes, [sample["disk"].get(name, 0) / MIB for sample in samples], lw=0.9, label=name)
    for suffix, label in ((".sqlite", "database"), ("-wal", "its log")):
        sizes = [sum(size for name, size in sample["disk"].items() if name.endswith(suffix)) for sample in samples]
        rows[3].plot(minutes, [size / MIB for size in sizes], lw=0.9, label=label)
    for axes, title in zip(rows, ("memory (RSS), MiB", "open handles", "threads", "disk, MiB"), strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper left", ncols=3)
    for kill in record["kills"]:
        at = next((sample["at_s"] / 60 for sample in samples if sample["requests"] >= kill), None)
        if at is not None:
            for axes in rows:
                axes.axvline(at, color="0.6", lw=0.6, ls=":")
    rows[-1].set_xlabel("minutes (dotted: the worker was killed)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_scenarios(samples: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """One row a scenario: distribution of TTFT by cache state, arrivals and completions over time."""
    names = [name for name, found in samples.items() if found] or [""]
    figure, rows = plt.subplots(len(names), 2, figsize=(11, 2.6 * len(names)), squeeze=False, layout="constrained")
    for name, (left, right) in zip(names, rows, strict=True):
        found = samples.get(name, ())
        by_state: dict[str, list[float]] = {}
        for sample in found:
            if sample["code"] == "ok" and sample["ttft_s"] is not None:
                by_state.setdefault(sample["cache_state"] or "unknown", []).append(sample["ttft_s"])
        for state, values in sorted(by_state.items()):
            shares = [(number + 1) / len(values) for number in range(len(values))]
            left.step(sorted(values), shares, where="post", label=f"{state} ({len(values)})")
        left.set_title(f"{name}: share of answers begun within", loc="left", fontsize=10)
        left.set_xlabel("TTFT, s")
        start = min((sample["arrived_at"] for sample in found), default=0.0)
        for field, label in (("arrived_at", "arrivals"), ("ended_at", "completions")):
            times = sorted(sample[field] - start for sample in found)
            right.step(times, range(1, len(times) + 1), where="post", label=label)
        right.set_title(f"{name}: arrivals and completions", loc="left", fontsize=10)
        right.set_xlabel("s")
        for axes in (left, right):
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
