"""Write the README's tables from measured results and declared settings; `--check` only compares."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def main() -> int:
    return fill(
        README,
        {
            "gpu": gpu_table(),
            "warm": warm_table(),
            "results": results_table(),
            "fidelity": fidelity_table(),
            "settings": settings_table(),
        },
        check="--check" in sys.argv,
    )


def fill(page: Path, tables: Mapping[str, str], *, check: bool) -> int:
    """Put each table between its marks `<!-- name -->`. Returns 1 if the page was to be checked and isn't so."""
    before = after = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        after, count = re.subn(pattern, lambda match, table=table: match[1] + table + match[2], after, flags=re.DOTALL)
        if count != 1:
            sys.exit(f"{page.name} needs one <!-- {name} --> section, has {count}")
    if check:
        if after != before:
            print(f"the tables of {page.name} are not those of the program: run {sys.argv[0]}")
        return int(after != before)
    page.write_text(after, encoding="utf-8")
    return 0


def gpu_table() -> str:
    """One row a length: TTFT and speed-up with FP8 and bf16 linears, and what they cost."""
    entries = {
        entry["name"]: entry for entry in json.loads((ROOT / "loadtests/results/summary.json").read_text("utf-8"))
    }
    rows = [
        "| tokens | FP8: TTFT, speed-up | bf16: TTFT, speed-up | keys a row (density) | recall: mean, p5, worst |",
        "| --- | --- | --- | --- | --- |",
    ]
    for length in ("8k", "32k", "128k", "512k", "1m"):
        columns, shown = [], None
        for kind in ("fp8", "bf16"):
            ttft, gain = entries.get(f"prefill_ttft_{length}_{kind}_s"), entries.get(f"prefill_speedup_{length}_{kind}")
            columns.append(f"{ttft['value']:.3g} s, {gain['value']:.3g}×" if ttft and gain else "–")
            shown = shown or ttft
        if shown is None:
            continue
        recall = [shown.get(f"recall_{name}") for name in ("mean", "p5", "worst")]
        kept = f"{shown['mean_keys']:,} ({shown['density']:.3g})"
        lost = ", ".join(f"{value:.3f}" for value in recall) if None not in recall else "all kept"
        rows.append(f"| {shown['tokens']:,} | {' | '.join(columns)} | {kept} | {lost} |")
    return "\n".join(rows) + "\n"


def warm_table() -> str:
    """One row a device and length: TTFT cold and from each tier, and what storing costs (loadtests/warm_ttft.py)."""
    entries = {
        entry["name"]: entry for entry in json.loads((ROOT / "loadtests/results/summary.json").read_text("utf-8"))
    }
    rows = [
        "| where | tokens | cold | warm: device | host | disk (share of its raw rate) | storing, of the prefill |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    found = []
    for name, entry in entries.items():
        if match := re.fullmatch(r"(cpu_)?(?:cold_ttft|warm_ttft)_([0-9]+[km]?)(?:_(?:host|device|disk))?_s", name):
            found.append((match[1] or "", entry["tokens"], match[2], entry["device"].partition(" (")[0]))
    for prefix, tokens, length, device in sorted(set(found)):

        def shown(name: str, prefix: str = prefix) -> str:
            entry = entries.get(prefix + name)
            return "–" if entry is None else f"{entry['value']:.3g} {entry['unit']}".removesuffix(" share")

        tiers = [shown(f"warm_ttft_{length}_{tier}_s") for tier in ("device", "host", "disk")]
        tiers[2] += f" ({shown(f'disk_read_share_{length}')})"
        cold, storing = shown(f"cold_ttft_{length}_s"), shown(f"store_overhead_{length}")
        rows.append(f"| {device} | {tokens:,} | {cold} | {' | '.join(tiers)} | {storing} |")
    return "\n".join(rows) + "\n" if found else "Not measured yet.\n"


def results_table() -> str:
    """One row a headline figure, in the file's order."""
    entries = json.loads((ROOT / "loadtests/results/summary.json").read_text(encoding="utf-8"))
    rows = ["| figure | value | where | measured by |", "| --- | --- | --- | --- |"]
    for entry in entries:
        value = f"{entry['value']:.4g} {entry['unit']}".strip()
        rows.append(f"| {entry['name']} | {value} | {entry['device']}, {entry['date'][:10]} | `{entry['command']}` |")
    return "\n".join(rows) + "\n"


def fidelity_table() -> str:
    """One row a task, and for each length the dense score, that of `default`, and the points lost with their bound."""
    path = ROOT / "loadtests/results/fidelity.json"
    if not path.is_file():
        return "Not measured yet.\n"
    report = json.loads(path.read_text(encoding="utf-8"))
    places = [(pooled["device"], pooled["tokens"]) for pooled in report["pooled"]]
    cells = {(cell["device"], cell["tokens"], cell["task"]): cell for cell in report["cells"]}
    titles = [
        f"{tokens // 1024}K, {device.split(' (')[0]}: exact | default | lost (bound) | ΔNLL"
        for device, tokens in places
    ]
    rows = [f"| task | {' | '.join(titles)} |", "| --- |" + " --- | --- | --- | --- |" * len(places)]
    for task in dict.fromkeys(cell["task"] for cell in report["cells"]):
        columns = [column for place in places for column in _fidelity_columns(cells.get((*place, task)))]
        rows.append(f"| {task} | {' | '.join(columns)} |")
    return "\n".join(rows) + "\n"


def _fidelity_columns(cell: Mapping[str, Any] | None) -> list[str]:
    found = None if cell is None else cell["policies"].get("default")
    if cell is None or cell["dense"] is None or found is None or "drop_points" not in found:
        return ["–"] * 4
    bound = found["drop_bound_points"]
    lost = f"{found['drop_points']:.1f}" + ("" if bound is None else f" ({bound:.1f})")
    dense, score = (100 * one["score"] for one in (cell["dense"], found))
    return [f"{dense:.1f}", f"{score:.1f}", lost if cell["counted"] else "not counted", f"{found['delta_nll']:+.3f}"]


def settings_table() -> str:
    from service.settings import Settings

    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        rows.append(f"| `FOREWORD_{name.upper()}` | `{field.default}` | {field.description} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
