"""The dashboard as a picture, drawn from a Prometheus: the same panels, the same queries.

`python -m tools.dashboard.picture --prometheus http://127.0.0.1:9090 --minutes 10 --out docs/images/dashboard.png`
"""

import argparse
import io
import math
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import httpx
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.dates import DateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LinearLocator
from PIL import Image

from tools.dashboard.panel import Panel
from tools.dashboard.panels import PANELS, VARIABLES

COLORS = ("#3b6fb6", "#d9822b", "#3f9c6b", "#b0475c", "#7a5fb0", "#8a6d3b", "#4aa3a8", "#c25fa0", "#888888")
INK, FAINT, PAPER = "#2b2f36", "#e3e6ea", "#ffffff"
COLUMNS = 3
WIDTH_IN, ROW_IN, DPI = 10.0, 2.1, 160  # read at about 1,000 pixels, sharp on a finer screen
POINTS = 240
# What a page of README has room for, the first row of the dashboard first.
SHOWN = (
    "First token, p95 by cache state",
    "First tokens, how many when how late",
    "Where a cold first token's time goes",
    "Where a warm first token's time goes",
    "Device-seconds per million tokens",
    "Users per device at the objective",
    "Unfinished jobs",
    "Speed of a prefill",
    "KV read by tier",
    "How a prefix's KV was come by",
    "Recall of prefills",
    "Heads by pattern",
)


class Source(Protocol):
    """tools.observe.prometheus.Prometheus, or another's address."""

    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]: ...


class Remote:
    """A Prometheus that runs somewhere."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
        parameters = {"query": expr, "start": str(start_s), "end": str(end_s), "step": str(step_s)}
        answer = httpx.post(f"{self._url.rstrip('/')}/api/v1/query_range", data=parameters, timeout=30)
        answer.raise_for_status()
        series: list[dict[str, Any]] = answer.json()["data"]["result"]
        return series


def draw(
    source: Source,
    out: Path,
    *,
    titles: Sequence[str] = SHOWN,
    minutes: float | None = None,
    end_s: float | None = None,
    rate: str | None = None,
) -> None:
    """Draw the panels `titles` to the PNG `out`, over the last `minutes` (None: since the server's first scrape)."""
    end_s = end_s or time.time()
    start_s = end_s - 60 * minutes if minutes is not None else first_scrape(source, end_s)
    rate = rate or ("2m" if end_s - start_s > 600 else "60s")
    panels = [panel for title in titles for panel in PANELS if panel.title == title]
    rows = math.ceil(len(panels) / COLUMNS)
    plt.rcParams.update({"font.family": "sans-serif", "font.size": 8, "text.color": INK, "axes.labelcolor": INK})
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(WIDTH_IN, rows * ROW_IN + 0.3), facecolor=PAPER, squeeze=False)
    step_s = max(1.0, (end_s - start_s) / POINTS)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _panel(figure, axis, panel, source, (start_s, end_s, step_s), rate)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    day = datetime.fromtimestamp(end_s, UTC)
    figure.suptitle(f"Foreword, {day:%Y-%m-%d}, UTC", x=0.012, y=0.995, ha="left", va="top", fontsize=9, weight="bold")
    figure.tight_layout(rect=(0, 0, 1, 1.0), h_pad=1.2, w_pad=1.0)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=DPI, facecolor=PAPER)
    plt.close(figure)
    with Image.open(buffer) as picture:
        picture.convert("RGB").quantize(256).save(out, optimize=True)


def first_scrape(source: Source, end_s: float) -> float:
    """Of the last six hours."""
    series = source.query_range("foreword_workers", end_s - 6 * 3600, end_s, 15)
    return min((float(one["values"][0][0]) for one in series), default=end_s - 600) - 5


def filled(expr: str, rate: str) -> str:
    """A query with Grafana's variables filled in."""
    expr = expr.replace("$__rate_interval", rate)
    for variable in VARIABLES:
        expr = expr.replace(f"${variable.name}", variable.choices[0])
    return expr


def _panel(
    figure: Figure, axis: Axes, panel: Panel, source: Source, span: tuple[float, float, float], rate: str
) -> None:
    axis.set_title(panel.title, loc="left", fontsize=8, weight="bold", color=INK, pad=6)
    axis.tick_params(colors=INK, length=0, labelsize=7)
    axis.grid(axis="y", color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)
    found = [
        (_legend(query.legend, one["metric"]), one["values"])
        for query in panel.queries
        for one in source.query_range(filled(query.expr, rate), *span)
    ]
    if panel.kind == "heatmap":
        _heatmap(axis, found)
    else:
        _lines(axis, panel, found)
    axis.set_xlim(*(date2num(datetime.fromtimestamp(at, UTC)) for at in span[:2]))
    axis.xaxis.set_major_locator(LinearLocator(4))
    axis.xaxis.set_major_formatter(DateFormatter("%H:%M" if span[1] - span[0] > 240 else "%H:%M:%S"))


def _lines(axis: Axes, panel: Panel, found: list[tuple[str, list[Any]]]) -> None:
    found = [(name, points) for name, points in sorted(found, key=lambda one: one[0]) if _seen(points)]
    times = sorted({at for _, points in found for at, _ in points})
    if panel.stacked:
        columns = [_column(points, times, missing=0.0) for _, points in found]
        shown = [number for number, column in enumerate(columns) if any(column)]
        if shown:
            axis.stackplot(
                _dates(times),
                [columns[number] for number in shown],
                labels=[found[number][0] for number in shown],
                colors=COLORS,
                alpha=0.85,
                linewidth=0,
            )
    else:
        for number, (name, points) in enumerate(found):
            color = COLORS[number % len(COLORS)]
            axis.plot(_dates(times), _column(points, times), label=name, color=color, linewidth=1.4)
    place = "upper left"
    if panel.limit is not None:
        axis.axhline(panel.limit, color=COLORS[3], linewidth=1, linestyle=(0, (4, 3)))
        values = [float(value) for _, points in found for _, value in points if math.isfinite(float(value))]
        axis.set_ylim(min(panel.limit, *values) - 0.05, 1.0)
        place = "lower left"
    if panel.log:
        axis.set_yscale("log")
        axis.minorticks_off()
    elif panel.limit is None:
        axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, panel.unit)))
    if found:
        axis.legend(
            loc=place, frameon=False, fontsize=6.8, ncols=2, handlelength=1.0, columnspacing=1.0, borderaxespad=0.1
        )
    if found and panel.limit is None:
        low, high = axis.get_ylim()  # room for the legend
        axis.set_ylim(low, high * (high / low) ** 0.35 if panel.log else low + (high - low) * 1.3)


def _heatmap(axis: Axes, found: list[tuple[str, list[Any]]]) -> None:
    """Buckets are cumulative: a row shows what came between its bound and the one below."""
    found = sorted(found, key=lambda one: float(one[0]))
    times = sorted({at for _, points in found for at, _ in points})
    columns = [_column(points, times, missing=0.0) for _, points in found]
    rows = [columns[0], *([b - a for a, b in zip(low, high, strict=True)] for low, high in pairwise(columns))]
    used = [number for number, row in enumerate(rows) if max(row, default=0.0) > 1e-9]
    if not used:
        return
    first, last = used[0], used[-1] + 1
    cells = [[value if value > 1e-9 else math.nan for value in row] for row in rows[first:last]]
    axis.pcolormesh(_dates(times), range(last - first + 1), [row[:-1] for row in cells], cmap="YlOrBr", shading="flat")
    bounds = ["0", *(bound for bound, _ in found)]
    labels = [amount(float(bound), "s") for bound in bounds[first : last + 1]]
    every = max(1, len(labels) // 7)
    axis.set_yticks(range(0, len(labels), every), labels[::every])


def _column(points: list[Any], times: list[float], missing: float = math.nan) -> list[float]:
    values = {at: float(value) for at, value in points}
    return [value if math.isfinite(value := values.get(at, missing)) else missing for at in times]


def _seen(points: list[Any]) -> bool:
    return any(math.isfinite(float(value)) for _, value in points)


def _dates(times: list[float]) -> list[float]:
    return [date2num(datetime.fromtimestamp(at, UTC)) for at in times]


def _legend(pattern: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        pattern = pattern.replace(f"{{{{{name}}}}}", value)
    return pattern.replace("_", " ")


def amount(value: float, unit: str) -> str:
    """A value as an axis shows it."""
    if unit == "percentunit":
        return f"{value:.0%}" if abs(value) >= 0.1 or value == 0 else f"{value:.1%}"
    if unit == "s":
        if value >= 120:
            return f"{value / 60:.3g} min"
        return f"{value:g} s" if value >= 1 or value == 0 else f"{value * 1000:g} ms"
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return (
                f"{value / factor:g} {letter}{'B' if unit in ('bytes', 'Bps') else ''}{'/s' if unit == 'Bps' else ''}"
            )
    return f"{value:g}" + {"ops": "/s", "reqps": "/s", "Bps": " B/s", "bytes": " B"}.get(unit, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prometheus", required=True, help="its address")
    parser.add_argument("--minutes", type=float, help="how far back (default: to the server's first scrape)")
    parser.add_argument("--until", type=float, help="end of the picture in unix seconds (default: now)")
    parser.add_argument("--rate", help="window of rates, at least four scrape intervals (default: 60s or 2m)")
    parser.add_argument("--out", type=Path, default=Path("docs/images/dashboard.png"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(Remote(options.prometheus), options.out, minutes=options.minutes, end_s=options.until, rate=options.rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
