"""A whole evaluation on a tiny model: what it writes, what it goes on with, where it stops."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests.fidelity.__main__ import main


def arguments(smallest: Path, results: Path, *more: str) -> list[str]:
    return [
        *("--model", str(smallest), "--device", "cpu", "--dtype", "float32", "--threads", "1"),
        *("--results", str(results), "--lengths", "9216", "--questions", "2", *more),
    ]


def lines(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (results / "fidelity.jsonl").read_text().splitlines()]


def test_evaluation_writes_its_tables_and_goes_on_where_it_stopped(
    smallest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--documents", "1", "--tasks", "vt", "--fidelities", "exact,default,a_shape"]
    assert main(arguments(smallest, tmp_path, *options)) == 0
    first = lines(tmp_path)
    assert [line["variant"] for line in first] == ["exact", "default", "a_shape"]
    for line in first:
        assert len(line["scores"]) == len(line["nlls"]) == 2
        assert 0.97 * (9216 - 300) < line["num_tokens"] <= 9216
        # Only the last segment lies behind the crossover.
        assert (line["density"] == 1.0) == (line["recall"] is None)
    by_variant = {line["variant"]: line for line in first}
    assert by_variant["exact"]["density"] == 1.0
    assert by_variant["a_shape"]["density"] < 1.0
    assert by_variant["exact"]["nlls"] != by_variant["a_shape"]["nlls"]

    options = ["--documents", "1", "--tasks", "vt,needle_map", "--fidelities", "exact"]
    assert main(arguments(smallest, tmp_path, *options)) == 0
    again = lines(tmp_path)
    assert again[:3] == first
    assert [(line["key"]["task"], line["variant"]) for line in again[3:]] == [("needle_map", "exact")]

    cells = json.loads((tmp_path / "fidelity.json").read_text())["cells"]
    assert [cell["task"] for cell in cells] == ["vt", "needle_map"]
    assert cells[0]["policies"]["a_shape"]["delta_nll"] != 0
    assert (tmp_path / "fidelity.png").stat().st_size > 0
    assert (tmp_path / "fidelity_needles.png").stat().st_size > 0
    names = {entry["name"] for entry in json.loads((tmp_path / "summary.json").read_text())}
    assert "tasks_counted_9k" in names
    assert "needle_map" in capsys.readouterr().out


def test_questions_at_other_times_and_kv_in_fp8_go_on_where_they_stopped(smallest: Path, tmp_path: Path) -> None:
    options = ["--documents", "1", "--tasks", "niah_single_1", "--lengths", "2048"]
    assert main(arguments(smallest, tmp_path, *options, "--fidelities", "default,late", "--in-prompt", "1")) == 0
    assert main(arguments(smallest, tmp_path, *options, "--fidelities", "late,default,fp8_kv")) == 0
    default, one, late, fp8 = lines(tmp_path)
    assert [line["variant"] for line in (default, one, late, fp8)] == ["default", "late", "late", "fp8_kv"]
    assert [line["key"]["late"] for line in (default, one, late, fp8)] == [0, 1, 2, 0]
    assert [len(line["in_prompt_nlls"]) for line in (default, one, late, fp8)] == [0, 1, 2, 0]
    assert len(late["second_scores"]) == len(late["second_in_prompt_nlls"]) == 2
    # Dense at this length, so that only the kernels' rounding differs, in a conversation too.
    assert late["nlls"] == pytest.approx(default["nlls"], rel=1e-5)
    assert late["in_prompt_nlls"] == pytest.approx(late["nlls"], rel=1e-4)
    assert late["second_in_prompt_nlls"] == pytest.approx(late["second_nlls"], rel=1e-4)
    assert late["second_nlls"] != pytest.approx(late["nlls"], rel=1e-2)
    assert fp8["nlls"] != default["nlls"]
    assert fp8["nlls"] == pytest.approx(default["nlls"], rel=0.2)
    trials = {trial["trial"]: trial for trial in json.loads((tmp_path / "fidelity.json").read_text())["trials"]}
    assert trials.keys() == {"late_question", "second_question", "fp8_kv"}
    assert trials["fp8_kv"]["delta_nll"] != 0


def test_used_up_budget_stops_cleanly(smallest: Path, tmp_path: Path) -> None:
    assert main(arguments(smallest, tmp_path, "--tasks", "vt", "--documents", "1", "--budget-s", "0")) == 1
    assert not (tmp_path / "fidelity.jsonl").exists()


def test_unknown_names_are_refused_with_what_is_known(
    smallest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, value in (("--tasks", "needles"), ("--fidelities", "exact,quick")):
        with pytest.raises(SystemExit):
            main(arguments(smallest, tmp_path, option, value))
    with pytest.raises(SystemExit):
        main(arguments(smallest, tmp_path, "--fidelities", "late", "--in-prompt", "0"))
    shown = capsys.readouterr().err
    assert "unknown task 'needles', expected all, ruler" in shown
    assert "unknown fidelity or policy 'quick', expected one of exact, default" in shown
    assert "--in-prompt: got 0, but late asks at least 1 question" in shown
