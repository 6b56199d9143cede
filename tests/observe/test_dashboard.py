"""The dashboard against the real Prometheus that scraped the real run; its JSON against Grafana's schema."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from PIL import Image

from tests.observe.conftest import RATE, Observed
from tools.dashboard.__main__ import TARGET
from tools.dashboard.panel import Panel
from tools.dashboard.panels import PANELS, VARIABLES
from tools.dashboard.picture import SHOWN, amount, draw

ROOT = Path(__file__).resolve().parents[2]
DEPLOYED = ROOT / "deploy/prometheus"
SERVING_S = 3.0  # whatever is there from the start is scraped by then
HERE = [panel for panel in PANELS if not panel.needs_gpu]


def changes(series: list[dict[str, Any]], started_at: float) -> bool:
    """Whether any series takes two values, or begins in the middle of the run."""
    values = [{value for _, value in one["values"]} for one in series]
    begins = [one["values"][0][0] - started_at for one in series]
    return any(len(found) > 1 for found in values) or max(begins) > SERVING_S


@pytest.mark.parametrize("panel", HERE, ids=lambda panel: panel.title)
def test_each_panel_has_data_and_a_change_in_it(observed: Observed, panel: Panel) -> None:
    found = [observed.evaluate(query.expr) for query in panel.queries]
    for query, series in zip(panel.queries, found, strict=True):
        assert any(value != "NaN" for one in series for _, value in one["values"]), f"no data: {query.expr}"
        for label in re.findall(r"{{(\w+)}}", query.legend):
            assert all(one["metric"].get(label) for one in series), f"no label {label}: {query.expr}"
    assert changes([one for series in found for one in series], observed.started_at), (
        f"nothing changes in {panel.title}"
    )


def test_no_query_makes_up_data() -> None:
    for panel in PANELS:
        for query in panel.queries:
            assert not re.search(r"vector\(|absent|or on|\bor\b", query.expr), query.expr


def expressions() -> list[tuple[str, str]]:
    groups = [group for name in ("rules.yml", "alerts.yml") for group in load(name)["groups"]]
    return [(rule.get("alert") or rule["record"], rule["expr"]) for group in groups for rule in group["rules"]]


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOYED / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "expr"), expressions(), ids=lambda value: value if value.isidentifier() else "")
def test_each_input_of_rules_and_alerts_has_data(observed: Observed, name: str, expr: str) -> None:
    selectors = re.findall(r"\b((?:foreword[:_]\w+(?::\w+)*|up)(?:\{[^}]*\})?)", expr)
    assert selectors, expr
    for selector in selectors:
        assert observed.evaluate(selector), f"{name}: no data for {selector}"


def test_no_alert_while_all_is_well_and_the_right_ones_after_faults(observed: Observed) -> None:
    assert observed.healthy_alerts == ()
    alerts = {alert["labels"]["alertname"] for alert in observed.prometheus.get("alerts")["alerts"]}
    assert alerts >= {"ForewordLeasesReclaimed", "ForewordStoredKVDamaged"}
    assert not alerts & {"ForewordNoWorker", "ForewordRecallLow", "ForewordHTTPErrors", "ForewordUploadsNearCap"}


def test_prometheus_takes_every_sample(observed: Observed) -> None:
    (target,) = observed.prometheus.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    log = observed.prometheus.log.read_text()
    assert not re.search(r"level=(warn|error)(?!.*(connection refused|alertmanager))", log), log[-2000:]


# --- Grafana -----------------------------------------------------------------------------------------------------


def test_the_dashboard_is_written_from_its_description() -> None:
    checked = subprocess.run([sys.executable, "-m", "tools.dashboard", "--check"], cwd=ROOT, capture_output=True)
    assert checked.returncode == 0, checked.stdout


def test_grafanas_schema_knows_every_field() -> None:
    """What Grafana's own model reads and writes again is what we wrote: a field it doesn't know would be lost."""
    register_default_plugins()
    ours = json.loads(TARGET.read_text(encoding="utf-8"))
    theirs = json.loads(JSONEncoder().encode(Dashboard.from_json(ours)))
    assert lost(ours, theirs) == []


def lost(ours: Any, theirs: Any, place: str = "") -> list[str]:
    if isinstance(ours, dict):
        if not isinstance(theirs, dict):
            return [place]
        return [found for name, value in ours.items() for found in lost(value, theirs.get(name), f"{place}/{name}")]
    if isinstance(ours, list):
        if not isinstance(theirs, list) or len(ours) != len(theirs):
            return [place]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [found for number, (mine, other) in pairs for found in lost(mine, other, f"{place}[{number}]")]
    return [] if ours == theirs else [place]


def test_a_field_that_grafana_does_not_know_is_seen() -> None:
    ours = json.loads(TARGET.read_text(encoding="utf-8"))
    ours["panels"][1]["options"]["legend"]["nonsense"] = 1
    theirs = json.loads(JSONEncoder().encode(Dashboard.from_json(ours)))
    assert lost(ours, theirs) == ["/panels[1]/options/legend/nonsense"]


def test_panels_do_not_overlap_and_names_are_single() -> None:
    dashboard = json.loads(TARGET.read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y)
            for x in range(place["w"])
            for y in range(place["h"])
            if place["x"] + x < 24
        }
        assert len(cells) == place["w"] * place["h"], f"{panel['title']} sticks out"
        assert not cells & taken, f"{panel['title']} overlaps"
        taken |= cells
    titles = [panel["title"] for panel in dashboard["panels"]]
    assert len(set(titles)) == len(titles)
    assert titles[:2] == ["Time to first token", "First token, p95 by cache state"]


def test_variables_of_queries_are_the_dashboards_and_objectives_are_buckets() -> None:
    from service.metrics import TTFT_BUCKETS

    known = {variable.name for variable in VARIABLES} | {"__rate_interval"}
    for panel in PANELS:
        for query in panel.queries:
            assert set(re.findall(r"\$(\w+)", query.expr)) <= known, query.expr
    objectives = next(variable.choices for variable in VARIABLES if variable.name == "objective")
    assert {float(choice) for choice in objectives} <= {float(bucket) for bucket in TTFT_BUCKETS}
    bounds = re.findall(r'le="([\d.]+)"', (DEPLOYED / "rules.yml").read_text())
    assert bounds
    assert {float(bound) for bound in bounds} <= {float(bucket) for bucket in TTFT_BUCKETS}


def test_provisioning_points_at_what_is_there() -> None:
    provisioning = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    (provider,) = yaml.safe_load((provisioning / "dashboards/foreword.yml").read_text())["providers"]
    assert provider["options"]["path"] == "$FOREWORD_DASHBOARDS"


def test_the_picture_is_drawn_from_the_same_data(observed: Observed, tmp_path: Path) -> None:
    draw(observed.prometheus, tmp_path / "dashboard.png", end_s=observed.ended_at, rate=RATE)
    with Image.open(tmp_path / "dashboard.png") as picture:
        assert picture.width == 1600
        assert len(picture.convert("RGB").resize((200, 200)).getcolors(40_000)) > 100, "an empty page"
    assert (tmp_path / "dashboard.png").stat().st_size < 300_000
    assert set(SHOWN) <= {panel.title for panel in PANELS}


def test_the_readme_shows_a_picture_of_modest_size() -> None:
    picture = ROOT / "docs/images/dashboard.png"
    assert "docs/images/dashboard.png" in (ROOT / "README.md").read_text()
    assert 20_000 < picture.stat().st_size <= 300_000


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.25, "s", "250 ms"),
        (3.5, "s", "3.5 s"),
        (600, "s", "10 min"),
        (0.955, "percentunit", "96%"),
        (2.5e9, "bytes", "2.5 GB"),
        (4e6, "Bps", "4 MB/s"),
        (12, "ops", "12/s"),
        (0, "s", "0 s"),
    ],
)
def test_axes_are_read_at_a_glance(value: float, unit: str, shown: str) -> None:
    assert amount(value, unit) == shown
