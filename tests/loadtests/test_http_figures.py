"""Arrivals, percentiles, slopes and verdicts of the load tests, on numbers whose answer is known."""

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from loadtests.http import soak
from loadtests.http.arrivals import poisson
from loadtests.http.clocks import compare_clocks
from loadtests.http.field_client import read_export
from loadtests.http.report import page
from loadtests.http.samples import Sample, length_class, percentile, read_samples, summarize, write_samples
from loadtests.http.scrape import TTFT, Scrape, bucket_of
from loadtests.http.slope import growth_share, theil_sen
from loadtests.http.soak_verdict import ALLOWED, MIB, judge
from loadtests.http.texts import CHARS_PER_TOKEN, Texts
from loadtests.http.usage import disk_usage


def test_arrivals_are_poisson_seeded_and_within_the_time() -> None:
    first = list(poisson(5.0, 400.0, seed=1))
    assert first == list(poisson(5.0, 400.0, seed=1)) != list(poisson(5.0, 400.0, seed=2))
    assert first == sorted(first)
    assert first[-1] < 400
    assert len(first) == pytest.approx(2000, abs=4 * math.sqrt(2000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(first)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert spread / mean == pytest.approx(1.0, abs=0.1)  # exponential gaps: as wide as they are long
    with pytest.raises(ValueError, match="above 0"):
        next(poisson(0.0, 1.0, seed=1))


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50.0, 95.0, 99.0, 100.0]
    assert percentile([3.0], 0.5) == 3.0
    assert math.isnan(percentile([], 0.5))
    with pytest.raises(ValueError, match="share"):
        percentile(values, 0)


@pytest.mark.parametrize(
    ("num_tokens", "name"), [(1, "≤ 512"), (512, "≤ 512"), (513, "≤ 1K"), (131_072, "≤ 128K"), (1 << 21, "above 1M")]
)
def test_length_classes(num_tokens: int, name: str) -> None:
    assert length_class(num_tokens) == name


def sample(code: str = "ok", ttft_s: float | None = 0.1, state: str | None = "warm_host", at: float = 0.0) -> Sample:
    return Sample("WarmQuestions", "ask", "a", at, at + 1.0, code, 900, ttft_s, state, ttft_s, code == "ok")


def test_goodput_counts_answers_within_their_objective() -> None:
    samples = [sample(), sample(ttft_s=1.5), sample(ttft_s=1.5, state="cold"), sample("left", 0.1, None, at=3.0)]
    samples.append(sample("rate_limit_exceeded", None, None))
    summary = summarize(samples, objectives_s={"warm": 1.0, "cold": 2.0})
    assert summary["goodput_per_s"] == pytest.approx(2 / 4.0)
    assert summary["good_share"] == pytest.approx(2 / 5)
    assert (summary["arrivals"], summary["completed"], summary["left"]) == (5, 3, 1)
    assert summary["errors"] == {"rate_limit_exceeded": 1}
    assert summary["ttft_s"]["warm_host"]["≤ 1K"]["count"] == 2


def test_samples_come_back_from_their_file(tmp_path: Any) -> None:
    samples = [sample(), sample("left", None, None)]
    write_samples(tmp_path / "samples.jsonl", samples)
    assert read_samples(tmp_path / "samples.jsonl") == samples


def test_clocks_are_compared_by_cache_state() -> None:
    counted = {(f"{TTFT}_count", (("cache_state", "warm_host"),)): 2.0}
    counted[f"{TTFT}_sum", (("cache_state", "warm_host"),)] = 0.3
    for bound, count in (("0.1", 0.0), ("0.2", 2.0), ("+Inf", 2.0)):
        counted[f"{TTFT}_bucket", (("cache_state", "warm_host"), ("le", bound))] = count
    table = compare_clocks([sample(), sample(ttft_s=0.3)], Scrape(counted))
    assert table == {
        "warm_host": {
            "client_count": 2,
            "client_mean_s": 0.2,
            "api_mean_s": 0.2,
            "histogram_count": 2,
            "histogram_mean_s": 0.15,
            "histogram_p50_s": [0.1, 0.2],
        }
    }
    assert all(math.isnan(bound) for bound in bucket_of([], 0.5))


def test_a_slope_isnt_moved_by_outliers() -> None:
    x = [float(number) for number in range(50)]
    y = [100.0 + 2.0 * value for value in x]
    y[10], y[40] = 10_000.0, -10_000.0
    assert theil_sen(x, y) == pytest.approx(2.0)
    assert growth_share(x, [200.0] * 50) == 0.0
    assert growth_share(x, [100.0 + value for value in x]) == pytest.approx(49 / 124.5)
    assert theil_sen([1.0, 1.0], [3.0, 9.0]) == 0.0


def soak_record() -> dict[str, Any]:
    def usage(pid: int) -> dict[str, int]:
        return {"pid": pid, "rss_bytes": 500 * MIB, "uss_bytes": 400 * MIB, "handles": 30, "threads": 11}

    samples = [
        {
            "at_s": 10.0 * number,
            "requests": 40 * number,
            "api": usage(1),
            "worker": usage(2 if number < 20 else 3),
            "disk": {
                "kv": 90 * MIB,
                "uploads": MIB,
                "documents": MIB,
                "a.sqlite": 40_000 * number,
                "a.sqlite-wal": MIB,
            },
        }
        for number in range(60)
    ]
    return {
        "samples": samples,
        "kills": [800],
        "caps": {"kv_disk_bytes": 96 * MIB},
        "evictions": 12.0,
        "tally": {f"{step} {sorted(codes)[0]}": 5 for step, codes in ALLOWED.items()},
        "answers_changed": [],
        "emptied_s": 1.0,
        "worker_lives_at_end": True,
        "disk_after_deleting_all": {"uploads": 0, "kv": 9000},
        "tracebacks": 0,
    }


def test_a_flat_soak_passes() -> None:
    verdict = judge(soak_record())
    assert verdict.faults == []
    assert verdict.growth["api_rss_share"] == 0.0
    assert verdict.growth["database_bytes_a_request"] == pytest.approx(1000)


def leak(record: dict[str, Any], process: str, field: str, step: int) -> None:
    for number, row in enumerate(record["samples"]):
        row[process][field] += step * number


FAULTS = {
    "memory of the api": (lambda record: leak(record, "api", "rss_bytes", MIB), "api: memory grows"),
    "memory of the worker": (lambda record: leak(record, "worker", "rss_bytes", 2 * MIB), "worker: memory grows"),
    "handles": (lambda record: leak(record, "api", "handles", 1), "more handles"),
    "threads": (lambda record: leak(record, "worker", "threads", 1), "more threads"),
    "cap": (lambda record: record["samples"][7]["disk"].update(kv=200 * MIB), "its cap is"),
    "log of the database": (lambda record: record["samples"][7]["disk"].update({"a.sqlite-wal": 99 * MIB}), "log grew"),
    "error": (lambda record: record["tally"].update({"ask internal_error": 1}), "ask: internal_error, 1 times"),
    "crash of a user": (lambda record: record["tally"].update({"user KeyError": 1}), "user: KeyError"),
    "step left out": (lambda record: record["tally"].pop("withdraw ok"), "no withdraw was tried"),
    "changed answer": (
        lambda record: record["answers_changed"].append("file-1 cold: 'a', then 'b'"),
        "answers changed",
    ),
    "queue": (lambda record: record.update(emptied_s=None), "left in the queue"),
    "worker gone": (lambda record: record.update(worker_lives_at_end=False), "no worker"),
    "traceback": (lambda record: record.update(tracebacks=1), "tracebacks"),
    "files left": (lambda record: record["disk_after_deleting_all"].update(kv=80 * MIB), "are left of kv"),
    "cap too wide": (lambda record: record.update(evictions=0.0), "nothing was evicted"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_soak_fails_by_each_fault(fault: str) -> None:
    spoil, words = FAULTS[fault]
    record = copy.deepcopy(soak_record())
    spoil(record)
    assert any(words in found for found in judge(record).faults), judge(record).faults


def test_texts_are_seeded_differ_and_hold_their_numbers() -> None:
    first, second, other = Texts(1), Texts(1), Texts(2)
    text = first.draw(500)
    assert text == second.draw(500)
    assert text.data not in (first.draw(500).data, other.draw(500).data)
    assert len(text.data) == pytest.approx(500 * CHARS_PER_TOKEN, rel=0.3)
    for question, number in text.numbers.items():
        key = question.split(" for ")[1].split(" ")[0]
        assert f"for {key} is: {number}." in text.data.decode()


def test_an_export_of_aiperf_is_read_in_seconds() -> None:
    figure = {"unit": "ms", "avg": 250.0, "p50": 200.0, "p95": 400.0, "p99": 500.0}
    export = {"request_count": {"avg": 24.0}, "time_to_first_token": figure, "error_summary": []}
    found = read_export(export)
    assert found["requests"] == 24
    assert found["errors"] == []
    assert found["time_to_first_token_s"] == {"avg": 0.25, "p50": 0.2, "p95": 0.4, "p99": 0.5}


def test_the_page_shows_names_as_text() -> None:
    told = {"device": "<script>", "commit": "c", "date": "d", "faults": ["<b>late</b>"], "client": "x", "runs": {}}
    shown = page({"client": told}, None)
    assert "<script>" not in shown
    assert "&lt;b&gt;late" in shown


def test_a_record_can_be_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "old.json"
    record.write_text(json.dumps(soak_record()), encoding="utf-8")
    assert soak.main(["--record", str(record), "--out", str(tmp_path), "--dry"]) == 0
    assert "passed" in capsys.readouterr().out
    assert json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))["verdict"]["passed"]
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


def test_disk_usage_tells_kv_from_its_index(tmp_path: Path) -> None:
    (tmp_path / "kv" / "ab").mkdir(parents=True)
    for name, size in (("kv/ab/one.kv", 500), ("kv/index.sqlite3", 70), ("kv/index.sqlite3-wal", 30), ("secret", 32)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert disk_usage(tmp_path) == {"kv": 500, "kv_index": 100, "secret": 32}
