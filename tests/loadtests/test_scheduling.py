"""The figures of fairness and mixed load on known numbers, and a short flood against a real cluster."""

from pathlib import Path
from typing import Any

import pytest

from loadtests import fairness, mixed_load, quiet
from loadtests.fairness import FLOODING, ratios, waits
from service.queue.base import Job, JobKind


def job(kind: JobKind, tenant: str, payload: dict[str, Any], created_at: float, started_at: float) -> Job:
    return Job(
        id=f"{kind}-{payload}",
        kind=kind,
        tenant=tenant,
        payload=payload,
        priority=0,
        state="succeeded",
        attempts=1,
        epoch=2,
        progress=1.0,
        detail={},
        result={},
        error=None,
        created_at=created_at,
        started_at=started_at,
        finished_at=started_at + 1,
        cancel_requested=False,
    )


def test_a_rounds_wait_is_what_its_jobs_waited() -> None:
    def round_of(tenant: str, document: str, uploaded_at: float) -> list[Job]:
        prefill = {"document_id": document, "uploaded_at": uploaded_at, "ingest_seconds": 0.5}
        return [
            job("ingest", tenant, {"file_id": "x"}, uploaded_at, uploaded_at + 1),
            job("prefill", tenant, prefill, uploaded_at + 1.5, uploaded_at + 3),  # waited 1 s, then 1.5 s
            job("answer", tenant, {"documents": [document]}, uploaded_at + 5, uploaded_at + 5.25),
        ]

    jobs = round_of("a", "doc-1", 100) + round_of("a", "doc-2", 109) + round_of("b", "doc-3", 105)
    jobs += round_of("b", "doc-4", 99) + round_of("b", "doc-5", 110)
    jobs += [job("answer", "c", {"documents": []}, 109, 112), job("answer", "c", {"documents": []}, 110, 111)]
    assert waits(jobs, 100, 110) == {"a": [2.75, 2.75], "b": [2.75], "c": [3]}


def test_each_tenants_ratio_is_of_its_own_waits() -> None:
    quiet_waits = {"a": [1.0] * 20, "b": [2.0] * 18 + [9.0, 9.0], FLOODING: [1.0]}
    flood_waits = {"a": [1.0] * 19 + [7.0], "b": [3.0] * 18 + [9.9, 20.0], FLOODING: [50.0]}
    assert ratios(quiet_waits, flood_waits) == {"a": 1.0, "b": pytest.approx(1.1)}


def test_questions_own_computing_is_no_cost_of_interleaving() -> None:
    found = {
        "long_s": {"alone": 100.0, "beside": 160.0},
        "question_computes_s": {"idle": 0.5},
        "ttft_s": {"idle": [1.0], "beside": [1.0] * 100},
    }
    assert mixed_load.cost_share(found) == pytest.approx(0.1)


def test_a_busy_machine_is_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    loads = iter([3.0, 0.9, 0.4])
    monkeypatch.setattr("os.getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert quiet.wait_until_quiet() == 0.4
    monkeypatch.setattr("os.getloadavg", lambda: (2.0, 0.0, 0.0))
    assert quiet.wait_until_quiet(patience_s=0.0) == 2.0
    assert "not quiet" in capsys.readouterr().err


def test_a_flood_against_a_real_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "WARM_UP_S", 1.0)
    with fairness.cluster(tmp_path) as place:
        without, flood = fairness.measure(place, 8.0, 1)
    assert set(without) == set(flood) == set(fairness.KEYS.values())
    found = ratios(without, flood)
    # First come, first served would make everybody wait three times as long.
    assert sorted(found.values())[len(found) // 2] < 2.0
