"""The short form of the load tests against a real server: several tenants at once, then clients that leave."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("report")
    command = [sys.executable, "-m", "loadtests.http", "--only", "tenants", "storm", "--out", str(out), "--dry"]
    command += ["--seconds", "3", "--rate", "4", "--tokens", "100", "300", "--seed", "2"]
    environment = {**os.environ, "FOREWORD_LEASE_S": "60"}  # of a machine so slow that the worker is late
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    return done, out


def test_tenants_are_served_and_see_nothing_of_each_other(
    report: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, out = report
    tenants = json.loads((out / "http.json").read_text(encoding="utf-8"))["tenants"]
    assert tenants["faults"] == [], done.stderr
    assert tenants["completed"] == tenants["arrivals"] > 5
    assert tenants["right_share"] > 0.5
    assert any(sample["step"] == "trespass" for sample in tenants["samples"])
    assert len(tenants["tenants"]) > 1
    client, worker = (
        sum(row[f"{clock}_count"] for state, row in tenants["clocks"].items() if state.startswith("warm"))
        for clock in ("client", "histogram")
    )
    assert client == worker > 0  # the same answers, seen from both ends


def test_a_storm_of_disconnects_leaves_nothing_behind(
    report: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, out = report
    storm = json.loads((out / "http.json").read_text(encoding="utf-8"))["storm"]
    assert storm["faults"] == [], done.stderr
    assert done.returncode == 0, done.stderr
    assert storm["left"] >= 2
    assert storm["figures"]["documents_kept"] > 2


def test_the_report_is_a_page_and_a_picture(report: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, out = report
    page = (out / "http.html").read_text(encoding="utf-8")
    assert "<h2>tenants</h2>" in page
    assert "warm" in page
    assert "class=fault" not in page
    assert (out / "http.png").read_bytes().startswith(b"\x89PNG")
