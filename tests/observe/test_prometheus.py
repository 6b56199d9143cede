"""Scrape config, rules and alerts by promtool: each alert fires for its fault, alone, and none in a healthy run."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.dashboard.panels import PANELS
from tools.observe.prometheus import DEPLOYED, local_config

HOURS = 7
MINUTES = 60 * HOURS
WARM = 'model="m", cache_state="warm_disk"'
COLD = 'model="m", cache_state="cold"'
TTFT = "foreword_time_to_first_token_seconds"

# What a server at work looks like, a sample a minute: 6 warm answers a minute, a document a minute.
HEALTHY: Mapping[str, str] = {
    'up{job="foreword", instance="a:8000"}': "1x{n}",
    "foreword_workers": "1x{n}",
    "foreword_worker_restarts_total": "0x{n}",
    f'{TTFT}_bucket{{{WARM}, le="2.0"}}': "0+6x{n}",
    f"{TTFT}_count{{{WARM}}}": "0+6x{n}",
    f'{TTFT}_bucket{{{COLD}, le="600.0"}}': "0+1x{n}",
    f"{TTFT}_count{{{COLD}}}": "0+1x{n}",
    "foreword_oldest_job_age_seconds": "3x{n}",
    'foreword_device_seconds_total{device="cpu", stage="prefill"}': "0+30x{n}",
    'foreword_jobs{state="queued"}': "1x{n}",
    'foreword_jobs{state="dead"}': "2x{n}",
    "foreword_lease_reclaims_total": "0x{n}",
    "foreword_kv_checksum_failures_total": "0x{n}",
    "foreword_kv_read_errors_total": "0x{n}",
    'foreword_prefills_below_target_total{kind="repo"}': "0x{n}",
    'foreword_prefill_recall_count{kind="repo"}': "0+1x{n}",
    'foreword_prefill_recall_sum{kind="repo"}': "0+0.96x{n}",
    "foreword_disk_free_bytes": "90e9x{n}",
    "foreword_disk_floor_bytes": "1e9x{n}",
    "foreword_uploads_bytes": "1e9x{n}",
    "foreword_uploads_cap_bytes": "16e9x{n}",
    'foreword_kv_bytes{tier="disk"}': "19.5e9x{n}",  # a full cache is a good cache, as long as nothing has to go
    'foreword_kv_cap_bytes{tier="disk"}': "20e9x{n}",
    'foreword_kv_evictions_total{tier="disk", reason="capacity"}': "0x{n}",
    'foreword_http_requests_total{method="GET", route="/v1/files", status="200"}': "0+60x{n}",
    'foreword_http_requests_total{method="GET", route="/readyz", status="503"}': "0+12x{n}",
}

# fault → what is otherwise then, from the sixth hour on, and the alerts that must fire
BEFORE = MINUTES - 60
FAULTS: Mapping[str, tuple[Mapping[str, str], set[str]]] = {
    "the server is gone": ({'up{job="foreword", instance="a:8000"}': f"1x{BEFORE} 0x60"}, {"ForewordDown"}),
    "no worker lives": ({"foreword_workers": f"1x{BEFORE} 0x60"}, {"ForewordNoWorker"}),
    "a job kills its workers": (
        {"foreword_worker_restarts_total": f"0x{BEFORE} 1+1x60"},
        {"ForewordWorkerRestarts"},
    ),
    "a third of the warm answers is late": (
        {f'{TTFT}_bucket{{{WARM}, le="2.0"}}': f"0+6x{BEFORE} {6 * BEFORE + 4}+4x60"},
        {"ForewordWarmFirstTokenBurnsFast"},
    ),
    "a tenth of the warm answers is late for hours": (
        {f'{TTFT}_bucket{{{WARM}, le="2.0"}}': f"0+5.4x{MINUTES}"},
        {"ForewordWarmFirstTokenBurnsSlowly"},
    ),
    "documents take longer than ten minutes": (
        {f'{TTFT}_bucket{{{COLD}, le="600.0"}}': f"0+1x{BEFORE} {BEFORE}+0.5x60"},
        {"ForewordColdFirstTokenLate"},
    ),
    "a job waits and waits": ({"foreword_oldest_job_age_seconds": f"3x{BEFORE} 0+60x60"}, {"ForewordQueueWaits"}),
    "nothing is computed": (
        {'foreword_device_seconds_total{device="cpu", stage="prefill"}': f"0+30x{BEFORE} {30 * BEFORE}x60"},
        {"ForewordDeviceIdle"},
    ),
    "a worker fell silent": (
        {"foreword_lease_reclaims_total": f"0x{MINUTES - 5} 1x5"},
        {"ForewordLeasesReclaimed"},
    ),
    "a job was given up": ({'foreword_jobs{state="dead"}': f"2x{MINUTES - 5} 3x5"}, {"ForewordJobsDead"}),
    "a bit flipped on disk": (
        {"foreword_kv_checksum_failures_total": f"0x{MINUTES - 5} 1x5"},
        {"ForewordStoredKVDamaged"},
    ),
    "a stored file is gone": (
        {"foreword_kv_read_errors_total": f"0x{MINUTES - 5} 1x5"},
        {"ForewordStoredKVUnreadable"},
    ),
    "parts stay below their target": (
        {'foreword_prefills_below_target_total{kind="repo"}': f"0x{BEFORE} 0+1x60"},
        {"ForewordRecallBelowTarget"},
    ),
    "prefills keep too little": (
        {'foreword_prefill_recall_sum{kind="repo"}': f"0+0.96x{BEFORE} {0.96 * BEFORE}+0.85x60"},
        {"ForewordRecallLow"},
    ),
    "the disk fills up": ({"foreword_disk_free_bytes": f"90e9x{BEFORE} 1.2e9x60"}, {"ForewordDiskNearFloor"}),
    "uploads fill their cap": ({"foreword_uploads_bytes": f"1e9x{BEFORE} 15e9x60"}, {"ForewordUploadsNearCap"}),
    "KV has to go": (
        {'foreword_kv_evictions_total{tier="disk", reason="capacity"}': f"0x{BEFORE} 0+2x60"},
        {"ForewordKVNearCap"},
    ),
    "requests fail": (
        {'foreword_http_requests_total{method="GET", route="/v1/files", status="500"}': f"0x{BEFORE} 0+10x60"},
        {"ForewordHTTPErrors"},
    ),
}


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def firing(changes: Mapping[str, str], expected: set[str]) -> dict[str, Any]:
    """A promtool test: at the end exactly these alerts fire."""
    series = {**HEALTHY, **changes}
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)]
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values.format(n=MINUTES)} for name, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": f"{MINUTES}m", "exp_samples": samples}],
    }


def run_tests(folder: Path, tests: list[dict[str, Any]], *, every: str = "5m") -> None:
    rules = [str(DEPLOYED / name) for name in ("rules.yml", "alerts.yml")]
    path = folder / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": rules, "evaluation_interval": every, "tests": tests}))
    promtool("test", "rules", str(path))


def test_config_and_rules_are_valid(tmp_path: Path) -> None:
    promtool("check", "config", str(DEPLOYED / "prometheus.yml"))
    promtool("check", "rules", str(DEPLOYED / "rules.yml"), str(DEPLOYED / "alerts.yml"))
    (tmp_path / "local.yml").write_text(yaml.safe_dump(local_config(["127.0.0.1:1234"], 1)))
    promtool("check", "config", str(tmp_path / "local.yml"))


def test_each_alert_fires_for_its_fault_and_alone_and_none_in_a_healthy_run(tmp_path: Path) -> None:
    run_tests(tmp_path, [firing({}, set()), *(firing(changes, alerts) for changes, alerts in FAULTS.values())])


def test_the_tests_cover_every_alert_and_every_alert_says_what_to_do() -> None:
    (group,) = yaml.safe_load((DEPLOYED / "alerts.yml").read_text())["groups"]
    assert {rule["alert"] for rule in group["rules"]} == set().union(*(alerts for _, alerts in FAULTS.values()))
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "action"}


def test_a_wrong_expectation_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="FAILED"):
        run_tests(tmp_path, [firing({}, {"ForewordDown"})])


def test_gpu_panels_on_recorded_series(tmp_path: Path) -> None:
    """No GPU here: series of three GPUs, two of them of one machine, stand in for what NVML would say."""
    gpus = ('instance="a", gpu="0"', 'instance="a", gpu="1"', 'instance="b", gpu="0"')
    series = {
        'foreword_gpu_memory_bytes{gpu="0", instance="a"}': "10e9 12e9 14e9",
        'foreword_gpu_memory_bytes{gpu="1", instance="a"}': "20e9 20e9 20e9",
        'foreword_gpu_memory_bytes{gpu="0", instance="b"}': "5e9x2",
        'foreword_gpu_memory_total_bytes{gpu="0", instance="b"}': "80e9x2",
        'foreword_gpu_utilization_ratio{gpu="0", instance="b"}': "0.2x2",
        'foreword_gpu_memory_total_bytes{gpu="0", instance="a"}': "80e9x2",
        'foreword_gpu_memory_total_bytes{gpu="1", instance="a"}': "80e9x2",
        'foreword_gpu_utilization_ratio{gpu="0", instance="a"}': "0.5 0.9 0.7",
        'foreword_gpu_utilization_ratio{gpu="1", instance="a"}': "0 0 0.1",
    }
    expected = {
        "foreword_gpu_memory_bytes": (14e9, 20e9, 5e9),
        "foreword_gpu_memory_total_bytes": (80e9, 80e9, 80e9),
        "foreword_gpu_utilization_ratio": (0.7, 0.1, 0.2),
    }
    queries = [query.expr for panel in PANELS if panel.needs_gpu for query in panel.queries]
    tests = []
    for expr in queries:
        (values,) = [values for name, values in expected.items() if f"({name})" in expr]
        samples = [{"labels": f"{{{gpu}}}", "value": value} for gpu, value in zip(gpus, values, strict=True)]
        tests.append({"expr": expr, "eval_time": "2m", "exp_samples": samples})
    assert len(tests) == 3
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    run_tests(tmp_path, [{"interval": "1m", "input_series": inputs, "promql_expr_test": tests}], every="1m")
