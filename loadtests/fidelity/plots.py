"""Pictures of the fidelity tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from loadtests.fidelity.variants import DENSE, NAMES


def plot_table(table: Mapping[str, Any], path: Path) -> None:
    """A row a task, a column a variant, one panel a (device, length): scores written out, colour by the drop."""
    panels = [(pooled["device"], pooled["tokens"]) for pooled in table["pooled"]]
    figure, axes = plt.subplots(
        1, max(len(panels), 1), figsize=(5.2 * max(len(panels), 1), 7), squeeze=False, layout="constrained"
    )
    for (device, tokens), panel in zip(panels, axes[0], strict=False):
        cells = [cell for cell in table["cells"] if cell["device"] == device and cell["tokens"] == tokens]
        names = [name for name in NAMES if name == DENSE or any(name in cell["policies"] for cell in cells)]
        drops = [[cell["policies"].get(name, {}).get("drop_points", 0.0) for name in names] for cell in cells]
        image = panel.imshow(drops, cmap="RdYlGn_r", vmin=-10, vmax=10, aspect="auto")
        for row, cell in enumerate(cells):
            for column, name in enumerate(names):
                found = cell["dense"] if name == DENSE else cell["policies"].get(name)
                if found is not None:
                    panel.text(column, row, f"{100 * found['score']:.1f}", ha="center", va="center", fontsize=8)
        panel.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
        labels = [cell["task"] + ("" if cell["counted"] else " (not counted)") for cell in cells]
        panel.set_yticks(range(len(cells)), labels, fontsize=8)
        panel.set_title(f"{tokens} tokens, {device}", fontsize=9)
        figure.colorbar(image, ax=panel, label="points lost against dense", shrink=0.6)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_needle_map(maps: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One panel a variant: depth of the needle against length, colour by the score."""
    variants = [name for name in NAMES if any(found["variant"] == name for found in maps)]
    if not variants:
        return
    figure, axes = plt.subplots(
        1, len(variants), figsize=(3.2 * len(variants), 4), squeeze=False, sharey=True, layout="constrained"
    )
    for name, panel in zip(variants, axes[0], strict=True):
        mine = [found for found in maps if found["variant"] == name]
        finest = max(mine, key=lambda found: len(found["depths"]))["depths"]
        lengths = sorted({found["tokens"] for found in mine})
        by_length = {found["tokens"]: found["scores"] for found in mine if found["depths"] == finest}
        rows = [
            [by_length.get(length, [float("nan")] * len(finest))[i] for length in lengths] for i in range(len(finest))
        ]
        image = panel.imshow(rows, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        panel.set_title(name, fontsize=9)
        panel.set_xticks(range(len(lengths)), [f"{length // 1024}K" for length in lengths], fontsize=8)
        panel.set_yticks(range(len(finest)), [f"{depth:.0%}" for depth in finest], fontsize=8)
        panel.set_xlabel("tokens")
    axes[0][0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=list(axes[0]), label="share found")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_guard(found: Sequence[Any], path: Path) -> None:
    """Left: what the guard said against the truth, a dot a cell. Right: density layer by layer."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for kind in dict.fromkeys(one.kind for one in found):
        mine = [one for one in found if one.kind == kind]
        cells = [cell for one in mine for cell in one.cells]
        left.plot([cell.true for cell in cells], [cell.predicted for cell in cells], ".", ms=3, alpha=0.5, label=kind)
        layers = [sum(column) / len(mine) for column in zip(*(one.density_by_layer for one in mine), strict=True)]
        right.plot(layers, ".-", label=kind)
    low = min([cell.true for one in found for cell in one.cells], default=0.9)
    left.plot([low, 1], [low, 1], color="0.5", lw=0.8)
    left.axhline(found[0].target, color="0.5", lw=0.6, ls=":")
    left.set(
        xlabel="true recall (all rows)", ylabel="what the guard says", title="each (layer, segment, KV-head group)"
    )
    right.set(xlabel="layer", ylabel="density", ylim=(0, 1.02), title="share of the causal matrix computed")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_compare(report: Mapping[str, Any], path: Path) -> None:
    """A row a length: output error against time (as a share of dense attention's), and recall against density."""
    lengths = report["lengths"]
    figure, axes = plt.subplots(
        max(len(lengths), 1), 2, figsize=(11, 4.4 * max(len(lengths), 1)), squeeze=False, layout="constrained"
    )
    for found, (left, right) in zip(lengths, axes, strict=False):
        for policy in dict.fromkeys(entry["policy"] for entry in found["contenders"]):
            mine = [entry for entry in found["contenders"] if entry["policy"] == policy]
            if policy == "dense":
                continue
            left.plot([1 / entry["speedup"] for entry in mine], [entry["error"] for entry in mine], "o-", label=policy)
            # What kept everything lost nothing, which has no place on a logarithmic axis.
            known = [entry for entry in mine if entry["recall"] is not None and entry["recall"] < 1 - 1e-6]
            if known:
                places = [entry["density"] for entry in known], [1 - entry["recall"] for entry in known]
                right.plot(*places, "o-", label=policy)
        left.axvline(1, color="0.5", lw=0.8)
        left.set(xlabel="time, dense attention = 1", ylabel="relative output error", yscale="log")
        right.set(xlabel="density", ylabel="softmax mass lost (1 − recall)", yscale="log")
        left.set_title(f"{found['tokens']} tokens, {report['device']}", loc="left", fontsize=9)
        for panel in (left, right):
            panel.grid(alpha=0.3, which="both")
            panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
