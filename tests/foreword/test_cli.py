"""The command line as a process: exit status, what stands on which stream, errors as one line of JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str, data_dir: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "foreword", *arguments],
        env={**os.environ, "FOREWORD_DATA_DIR": str(data_dir), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def error_of(ended: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert ended.returncode == 2, ended.stderr
    error: dict[str, str] = json.loads(ended.stderr.strip().splitlines()[-1])["error"]
    assert error["message"]
    return error


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    (folder / "ships.py").write_text(
        "def anchor(ship, depth_m, chain_m):\n    return depth_m < chain_m\n\n\n"
        "def hoist(sail, mast):\n    return sail + mast\n"
    )
    return folder


def test_ask_cold_then_warm(source: Path, data_dir: Path) -> None:
    question = "What are the parameters of the function anchor?"
    cold = run("ask", str(source), question, "--max-tokens", "30", data_dir=data_dir)
    assert cold.returncode == 0, cold.stderr
    assert "depth_m" in cold.stdout
    assert "cold" in cold.stderr
    warm = run("ask", str(source), question, "--max-tokens", "30", data_dir=data_dir)
    assert warm.stdout == cold.stdout
    assert "warm" in warm.stderr

    listed = run("cache", "ls", data_dir=data_dir).stdout
    holder = next(word for word in listed.split() if word.startswith("ask:"))
    assert run("cache", "verify", data_dir=data_dir).returncode == 0
    assert "pinned" in run("cache", "pin", holder, data_dir=data_dir).stdout
    assert "is pinned" in error_of(run("cache", "evict", holder, data_dir=data_dir))["message"]
    assert "unpinned" in run("cache", "pin", holder, "--off", data_dir=data_dir).stdout
    assert run("cache", "evict", holder, data_dir=data_dir).stdout != "0.0 MB freed\n"
    again = run("ask", str(source), question, "--max-tokens", "30", data_dir=data_dir)
    assert "cold" in again.stderr, "its KV was evicted"


def test_ingest_writes_the_three_files(source: Path, data_dir: Path, tmp_path: Path) -> None:
    ended = run("ingest", str(source), "--out", str(tmp_path / "out"), data_dir=data_dir)
    assert ended.returncode == 0, ended.stderr
    assert {"document.txt", "tokens.npy", "manifest.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert "def anchor(ship" in (tmp_path / "out" / "document.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("ask", "no-such-folder", "What?"), "not_found"),
        (("ask",), "usage"),
        (("ingest", "no-such-folder", "--out", "out"), "not_found"),
        (("cache", "pin", "nobody"), "invalid_value"),
        (("cache", "evict"), "invalid_value"),
        (("plan", "--tokens", "0"), "usage"),
    ],
)
def test_errors_are_the_last_line_as_json(arguments: tuple[str, ...], code: str, data_dir: Path) -> None:
    assert error_of(run(*arguments, data_dir=data_dir))["code"] == code


def test_wrong_settings_and_missing_models_are_named(source: Path, data_dir: Path) -> None:
    wrong = error_of(run("serve", data_dir=data_dir, FOREWORD_PORT="many"))
    assert wrong["code"] == "invalid_setting"
    assert "port" in wrong["message"]
    missing = error_of(run("ask", str(source), "What?", data_dir=data_dir, FOREWORD_MODEL="/no/such/model"))
    assert missing["code"] == "model_error"
    assert "/no/such/model" in missing["message"]


def test_plan_says_both_numbers_where_it_does_not_fit(data_dir: Path) -> None:
    fits = run("plan", "--tokens", "20000", data_dir=data_dir)
    assert fits.returncode == 0
    assert "prefill" in fits.stdout
    too_long = run("plan", "--tokens", "600000", data_dir=data_dir)
    assert too_long.returncode == 1
    assert "600000" in too_long.stdout
    assert "524288" in too_long.stdout
