"""`python -m tools.observe_docs`: write the tables of docs/observe.md from the program; `--check` only compares."""

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from service.metrics import Metrics
from service.metrics_state import STATE
from service.metrics_vllm import COUNTERS, GAUGES, HISTOGRAMS
from tools.readme_tables import fill

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/observe.md"


def main() -> int:
    tables = {"metrics": metrics_table(), "vllm": vllm_table(), "alerts": alerts_table()}
    return fill(PAGE, tables, check="--check" in sys.argv)


def metrics_table() -> str:
    rows = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    metrics = Metrics()
    # The library keeps what a metric is in private fields and exports it only with samples.
    collectors: list[Any] = list(metrics.registry._collector_to_names)
    for made in collectors:
        name = f"{made._name}_total" if made._type == "counter" else made._name
        rows.append(_row(name, made._type, made._labelnames, made._documentation))
    for name, (labels, meaning) in STATE.items():
        rows.append(_row(name, "gauge", labels, meaning))
    return "\n".join(rows) + "\n"


def _row(name: str, kind: str, labels: tuple[str, ...], meaning: str) -> str:
    return f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels) or '–'} | {meaning} |"


def vllm_table() -> str:
    rows = ["| vLLM's name | ours |", "| --- | --- |"]
    rows += [f"| `{alias}` | `{name}` |" for alias, name in HISTOGRAMS.items()]
    rows += [f"| `{alias}_total` | `{name}_total`{_where(labels)} |" for alias, (name, labels) in COUNTERS.items()]
    rows += [f"| `{alias}` | `foreword_jobs`{_where(labels)} |" for alias, labels in GAUGES.items()]
    rows.append("| `vllm:kv_cache_usage_perc` | `foreword_kv_bytes` ÷ `foreword_kv_cap_bytes`, on disk |")
    return "\n".join(rows) + "\n"


def _where(labels: Any) -> str:
    return f" with {', '.join(f'`{name}={value}`' for name, value in labels.items())}" if labels else ""


def alerts_table() -> str:
    rows = ["| alert | severity | says |", "| --- | --- | --- |"]
    alerts = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8"))
    for rule in alerts["groups"][0]["rules"]:
        summary = re.sub(r"{{[^}]*}}", "…", rule["annotations"]["summary"])
        rows.append(f"| `{rule['alert']}` | {rule['labels']['severity']} | {summary} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
