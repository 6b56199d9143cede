"""Statistics, records and the report, on numbers known beforehand."""

import json
import statistics
from dataclasses import replace
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
    **late: list[float],
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
        command="python -m loadtests.fidelity --lengths 32768",
        versions={"torch": "2"},
        commit="abc",
        date="2026-01-01T00:00:00+00:00",
        **late,
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
    records += [record("default", i, [0.5, 1.0]) for i in range(2)]
    table = report.build(records)
    report.write_summary(table, records, summary=tmp_path / "summary.json")
    entries = {entry["name"]: entry for entry in json.loads((tmp_path / "summary.json").read_text())}
    assert entries["worst_task_drop_bound_32k"]["value"] == 25.0
    assert entries["worst_task_drop_bound_32k"]["task"] == "vt"
    assert entries["pooled_drop_32k"]["value"] == 25.0
    assert entries["tasks_counted_32k"]["value"] == 1
    assert entries["pooled_drop_32k"]["device"] == "a device"
    assert entries["pooled_drop_32k"]["commit"] == "abc"
    assert entries["pooled_drop_32k"]["command"] == "python -m loadtests.fidelity --lengths 32768"
    assert not [name for name in entries if "question" in name or "fp8" in name]
    text = report.printed(table)
    assert "vt" in text
    assert "25.0" in text


def test_late_and_second_questions_are_held_against_those_in_the_prompt(tmp_path: Path) -> None:
    asked: dict[str, list[float]] = {
        "in_prompt_scores": [1.0, 1.0],
        "in_prompt_nlls": [0.4, 0.4],
        "second_scores": [1.0, 0.0],
        "second_nlls": [0.9, 0.9],
        "second_in_prompt_scores": [0.0, 1.0],
        "second_in_prompt_nlls": [1.0, 1.0],
    }
    records = [record("late", i, [1.0, 0.5], nll=0.5, **asked) for i in range(3)]
    # The model can't do it in the prompt either: in ΔNLL alone.
    hopeless: dict[str, list[float]] = {"in_prompt_scores": [0.0, 0.2], "in_prompt_nlls": [0.8, 0.8]}
    records += [record("late", i, [0.2, 0.0], task="cwe", nll=0.5, **hopeless) for i in range(3)]
    table = report.build(records)
    assert (table["cells"], table["needle_map"]) == ([], []), "late questions are no policy"
    later, second = table["trials"]
    assert (later["trial"], later["drop_points"], later["drop_bound_points"]) == ("late_question", 25.0, 25.0)
    assert (later["tasks"], later["documents"], later["questions"]) == (["vt"], 3, 6)
    assert later["delta_nll"] == pytest.approx((0.1 - 0.3) / 2)
    assert (second["trial"], second["drop_points"], second["documents"]) == ("second_question", 0.0, 3)
    assert second["delta_nll"] == pytest.approx(-0.1)
    report.write_summary(table, records, summary=tmp_path / "summary.json")
    entries = {entry["name"]: entry for entry in json.loads((tmp_path / "summary.json").read_text())}
    assert entries.keys() == {"late_question_drop_points", "second_question_drop_points"}
    entry = entries["late_question_drop_points"]
    assert (entry["value"], entry["bound"], entry["tokens"], entry["device"]) == (25.0, 25.0, 32768, "a device")
    assert "question in the prompt − asked later, 32768 tokens, a device: 25.0 points" in report.printed(table)


def test_fp8_kv_is_held_against_the_models_own_and_the_longest_is_the_headline(tmp_path: Path) -> None:
    records = [record("default", i, [1.0, 1.0]) for i in range(3)]
    records += [record("fp8_kv", i, [1.0, 0.5 if i else 1.0], nll=0.75) for i in range(2)]
    longer = [replace(made, key=replace(made.key, tokens=131072), scores=[1.0, 1.0]) for made in records]
    table = report.build([*longer, *records])
    short, long = table["trials"]
    assert (short["tokens"], short["documents"], short["drop_points"]) == (32768, 2, 25 / 2)
    assert short["delta_nll"] == 0.25
    assert (long["tokens"], long["drop_points"], long["drop_bound_points"]) == (131072, 0.0, 0.0)
    # It is a column of the table against dense as well, where dense was measured.
    assert table["cells"][0]["policies"]["fp8_kv"]["nll"] == 0.75
    report.write_summary(table, [*longer, *records], summary=tmp_path / "summary.json")
    entries = {entry["name"]: entry for entry in json.loads((tmp_path / "summary.json").read_text())}
    assert entries.keys() == {"fp8_kv_drop_points"}, "without dense there is no task to count"
    assert (entries["fp8_kv_drop_points"]["value"], entries["fp8_kv_drop_points"]["tokens"]) == (0.0, 131072)


def test_one_document_gives_no_headline(tmp_path: Path) -> None:
    records = [record("late", 0, [1.0], in_prompt_scores=[1.0], in_prompt_nlls=[0.5])]
    table = report.build(records)
    assert table["trials"][0]["drop_points"] == 0.0
    report.write_summary(table, records, summary=tmp_path / "summary.json")
    assert not (tmp_path / "summary.json").exists()
