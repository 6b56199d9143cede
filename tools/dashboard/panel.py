"""What a panel is, whoever shows it."""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["timeseries", "heatmap", "state"]


@dataclass(frozen=True)
class Query:
    expr: str  # PromQL, with $__rate_interval and the dashboard's variables
    legend: str  # with {{label}}


@dataclass(frozen=True)
class Panel:
    title: str
    meaning: str
    queries: tuple[Query, ...]
    unit: str = "short"  # Grafana's: s, bytes, Bps, percentunit, reqps, …
    kind: Kind = "timeseries"
    stacked: bool = False
    log: bool = False  # logarithmic axis
    limit: float | None = None  # a line, where there is a bound to see
    needs_gpu: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class Variable:
    """A number that the reader picks."""

    name: str
    label: str
    choices: tuple[str, ...]  # the first is the default
    meaning: str
