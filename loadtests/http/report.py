"""http.json, http.png and http.html: what the scenarios measured, with the soak's verdict where there is one."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtests.http.plots import plot_scenarios

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #8884; padding: .2rem .8rem .2rem 0; text-align: left; }
img { max-width: 100%; background: #fff; } .fault { color: #c00; font-weight: 600; } code { font-size: .9em; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #e8e8e8; } .fault { color: #ff7b72; } }
"""
CLOCKS = (
    "The client's clock stops at the first text, the API's at the first token event it sends on, the worker's "
    "histogram when the first token is ready. So of warm answers the client's mean is above the histogram's by the "
    "way there and back, the queue of events and, where many clients share one process, its own delays. A cold "
    "observation of the histogram is of a prefill, those that a scenario begins with among them: from "
    "upload complete to its last row's logits. The client goes on waiting until its own question, put behind the "
    "prefill, has its first text."
)


def write_report(results: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """`results` by scenario take the place of those of earlier runs in `out`."""
    stored, soak = out / "http.json", out / "soak.json"
    known = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    known |= results
    stored.write_text(json.dumps(known, ensure_ascii=False, indent=None) + "\n", encoding="utf-8")
    plot_scenarios({name: result["samples"] for name, result in known.items() if "samples" in result}, out / "http.png")
    record = json.loads(soak.read_text(encoding="utf-8")) if soak.exists() else None
    (out / "http.html").write_text(page(known, record), encoding="utf-8")


def page(results: Mapping[str, Mapping[str, Any]], soak: Mapping[str, Any] | None) -> str:
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Load over HTTP</title>",
        f"<style>{STYLE}</style><h1>Load over HTTP</h1><p>Made by <code>make loadtest</code>.</p>",
        "<img src=http.png alt='Distribution of TTFT by scenario and cache state; arrivals and completions over time'>",
    ]
    for name, result in results.items():
        parts.append(f"<h2>{_text(name)}</h2>")
        parts.append(f"<p>{_text(result['device'])}; commit {_text(result['commit'])}, {_text(result['date'])}</p>")
        parts += [f"<p class=fault>{_text(fault)}</p>" for fault in result["faults"]]
        parts.append(_client(result) if "client" in result else _scenario(result))
    parts.append(f"<h2>Clocks</h2><p>{_text(CLOCKS)}</p>")
    if soak is not None:
        parts.append(_soak(soak))
    return "\n".join(parts) + "\n</html>\n"


def _scenario(result: Mapping[str, Any]) -> str:
    facts: dict[str, Any] = {
        "load": result["load"],
        "arrivals": result["arrivals"],
        "completed": result["completed"],
        "left": result["left"],
    }
    facts |= {f"error {code}": count for code, count in result["errors"].items()}
    objectives = ", ".join(f"{kind} {seconds:g} s" for kind, seconds in result["objectives_s"].items())
    facts |= {f"goodput at TTFT {objectives}": f"{result['goodput_per_s']} /s ({result['good_share']:.0%})"}
    if result["right_share"] is not None:
        facts["answers with the hidden number"] = f"{result['right_share']:.0%}"
    facts |= {"latest start of a request": f"{result['latest_start_s']} s", **result["figures"]}
    rows = [
        (state, length, *(figures[key] for key in ("count", "p50", "p95", "p99", "mean")))
        for state, lengths in result["ttft_s"].items()
        for length, figures in lengths.items()
    ]
    tables = [_table(("", ""), facts.items())]
    tables.append(_table(("cache state", "tokens", "answers", "TTFT p50, s", "p95", "p99", "mean"), rows))
    if len(result["tenants"]) > 1:
        tenants = [
            (name, *(figures[key] for key in ("count", "p50", "p95", "p99")))
            for name, figures in result["tenants"].items()
        ]
        tables.append(_table(("tenant", "answers", "TTFT p50, s", "p95", "p99"), tenants))
    keys = ("client_count", "client_mean_s", "api_mean_s", "histogram_count", "histogram_mean_s", "histogram_p50_s")
    clocks = [(state, *(row[key] for key in keys)) for state, row in result["clocks"].items()]
    heads = (
        "TTFT of",
        "client saw",
        "client mean, s",
        "API mean",
        "worker counted",
        "worker mean",
        "worker p50 between",
    )
    tables.append(_table(heads, clocks))
    return "\n".join(tables)


def _client(result: Mapping[str, Any]) -> str:
    rows = []
    for name, figures in result["runs"].items():
        for figure in ("time_to_first_token_s", "request_latency_s", "inter_token_latency_s"):
            if values := figures.get(figure):
                rows.append((name, figures["requests"], figure, *values.values()))
    heads = ("run", "requests", "figure", "mean", "p50", "p95", "p99")
    return f"<p>{_text(result['client'])}, unmodified</p>{_table(heads, rows)}"


def _soak(record: Mapping[str, Any]) -> str:
    verdict = record["verdict"]
    facts = {"minutes": record["minutes"], "requests": record["requests"], "worker kills": len(record["kills"])}
    facts |= {"evictions": record["evictions"], "answers compared": record["answers_checked"]}
    facts |= {name: f"{value:.4g}" for name, value in verdict["growth"].items()}
    faults = "".join(f"<p class=fault>{_text(fault)}</p>" for fault in verdict["faults"])
    image = "<img src=soak.png alt='Memory, handles, threads and disk over the soak'>"
    return f"<h2>Soak</h2>{faults}{_table(('', ''), facts.items())}{image}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = "".join(f"<th>{_text(name)}</th>" for name in heads) if any(heads) else ""
    return f"<table><tr>{head}</tr>{body}</table>"


def _text(value: Any) -> str:
    return html.escape("–" if value is None else str(value))
