"""Statistics, records and the report, on numbers known beforehand."""

import json
import statistics
from pathlib import Path

import pytest

from loadtests.fidelity import report
from loadtests.fidelity.paired import paired, t_quantile
from loadtests.fidelity.records import Key, Record, RecordFile


def record(
    variant: str,
    index: int,
    scores: list[float],
    *,
    task: str = "vt",
    nll: float = 0.5,
    digest: str = "",
    in_prompt: list[float] | None = None,
) -> Record:
    return Record(
        key=Key("a device", digest or variant, task, 32768, len(scores), index),
        variant=variant,
        num_tokens=32000,
        scores=scores,
        nlls=[nll] * len(scores),
        replies=["one\u2028line"],
        density=1.0 if variant == "exact" else 0.4,
        recall=None if variant == "exact" else {"mean": 0.96, "worst": 0.9, "below_target": False},
        heads={},
        prefill_s=2.0,
        answer_s=1.0,
        in_prompt_scores=in_prompt or [],
        command="python -m loadtests.fidelity --lengths 32768",
        versions={"torch": "2"},
        commit="abc",
        date="2026-01-01T00:00:00+00:00",
    )


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [(0.95, 1, 6.3138), (0.95, 9, 1.8331), (0.95, 19, 1.7291), (0.99, 4, 3.7469), (0.95, 500, 1.6479)],
)
def test_t_quantile_is_that_of_the_tables(probability: float, freedom: int, expected: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(expected, abs=2e-4)


def test_paired_bound_is_students() -> None:
    values = [1.0, 0.0, 2.0, -1.0]
    found = paired(values)
    assert found.mean == 0.5
    assert found.upper == pytest.approx(0.5 + 2.3534 * statistics.stdev(values) / 2, abs=1e-3)
    assert paired([3.0]).upper is None
    with pytest.raises(ValueError, match="no differences"):
        paired([])


def test_records_survive_a_killed_run_and_old_digests_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    file = RecordFile(path)
    file.append(record("default", 0, [1.0], digest="old"))
    file.append(record("exact", 0, [1.0]))
    file.append(record("default", 0, [0.0], digest="new"))
    with path.open("a") as broken:
        broken.write('{"key": {"dev')
    again = RecordFile(path)
    assert again.records == file.records
    assert record("default", 0, [1.0], digest="old").key in again
    assert record("default", 1, [1.0], digest="old").key not in again
    assert [found.key.digest for found in again.newest()] == ["exact", "new"]
    again.append(record("exact", 1, [1.0]))
    assert len(RecordFile(path).records) == 4


def test_drops_are_paired_by_document() -> None:
    records = [record("exact", i, [1.0, 1.0]) for i in range(4)]
    records += [record("default", i, [1.0, 0.5 if i == 2 else 1.0], nll=0.51) for i in range(3)]
    records += [record("exact", 0, [0.2], task="cwe"), record("default", 0, [0.1], task="cwe")]
    table = report.build(records)
    by_task = {cell["task"]: cell for cell in table["cells"]}
    found = by_task["vt"]["policies"]["default"]
    assert by_task["vt"]["dense"]["documents"] == 4
    assert (found["documents"], found["pairs"]) == (3, 3)
    assert found["drop_points"] == pytest.approx(25 / 3)
    assert found["drop_bound_points"] == pytest.approx(25 / 3 + 2.92 * statistics.stdev([0, 0, 25]) / 3**0.5, abs=0.01)
    assert found["delta_nll"] == pytest.approx(0.01)
    assert (by_task["vt"]["counted"], by_task["cwe"]["counted"]) == (True, False)
    pooled = table["pooled"][0]
    # cwe is beyond the dense model: it counts in ΔNLL alone.
    assert pooled["counted_ruler"] == ["vt"]
    assert pooled["policies"]["default"]["drop_points"] == pytest.approx(25 / 3)
    assert pooled["policies"]["default"]["task_bounds"] == {"vt": found["drop_bound_points"]}


def test_headline_figures(tmp_path: Path) -> None:
    records = [record("exact", i, [1.0, 1.0]) for i in range(2)]
    records += [record("default", i, [0.5, 1.0], in_prompt=[1.0]) for i in range(2)]
    table = report.build(records)
    report.write_summary(table, records, summary=tmp_path / "summary.json")
    entries = {entry["name"]: entry for entry in json.loads((tmp_path / "summary.json").read_text())}
    assert entries["worst_task_drop_bound_32k"]["value"] == 25.0
    assert entries["worst_task_drop_bound_32k"]["task"] == "vt"
    assert entries["pooled_drop_32k"]["value"] == 25.0
    assert entries["tasks_counted_32k"]["value"] == 1
    assert entries["late_question_drop_points"]["value"] == 50.0
    assert entries["pooled_drop_32k"]["device"] == "a device"
    assert entries["pooled_drop_32k"]["commit"] == "abc"
    assert entries["pooled_drop_32k"]["command"] == "python -m loadtests.fidelity --lengths 32768"
    text = report.printed(table)
    assert "vt" in text
    assert "25.0" in text
