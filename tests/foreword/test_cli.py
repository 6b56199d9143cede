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
    assert "warning" not in fits.stdout
    unproven = run("plan", "--tokens", "70000", data_dir=data_dir)
    assert "70000 tokens are more than the 65536 that this model was trained for" in unproven.stdout
    too_long = run("plan", "--tokens", "600000", data_dir=data_dir)
    assert too_long.returncode == 1
    assert "600000" in too_long.stdout
    assert "524288" in too_long.stdout


def test_a_profile_is_written_and_used(source: Path, data_dir: Path, tmp_path: Path) -> None:
    text, heads = tmp_path / "text.txt", tmp_path / "heads.json"
    text.write_text("\n".join(f"Ship {number} carries {number * 37 % 911} barrels." for number in range(1200)))
    sizes = ("--budget", "512", "--tokens", "4608")
    made = run("profile", "--text", str(text), "--out", str(heads), *sizes, data_dir=data_dir)
    assert made.returncode == 0, made.stderr
    assert "4,608 tokens, 270 heads" in made.stderr
    assert {len(layer) for layer in json.loads(heads.read_text())} == {9}

    question = ("ask", str(source), "What are the parameters of the function anchor?", "--max-tokens", "5")
    assert run(*question, data_dir=data_dir).returncode == 0
    other = run(*question, "--head-config", str(heads), data_dir=data_dir)
    assert "cold" in other.stderr, "its KV is another policy's"
    assert "warm" in run(*question, data_dir=data_dir, FOREWORD_HEAD_CONFIG=str(heads)).stderr
    assert "cold" in run(*question, "--policy", "a_shape", data_dir=data_dir).stderr


def test_wrong_policies_and_head_configs_are_named(source: Path, data_dir: Path, tmp_path: Path) -> None:
    heads = tmp_path / "heads.json"
    heads.write_text('[{"0": ["stream_llm", 64, 1024, 0.9]}]')
    ask = ("ask", str(source), "What?")
    other = error_of(run(*ask, "--head-config", str(heads), data_dir=data_dir))
    assert other["code"] == "model_error"
    assert "1 layers of 1 heads, the model 30 layers of 9 heads" in other["message"]
    both = error_of(run(*ask, "--head-config", str(heads), "--policy", "a_shape", data_dir=data_dir))
    assert both["code"] == "invalid_value"
    missing = error_of(run(*ask, "--head-config", str(tmp_path / "none.json"), data_dir=data_dir))
    assert "none.json" in missing["message"]
    unknown = error_of(run("serve", data_dir=data_dir, FOREWORD_SPARSE_POLICY="magic"))
    assert unknown["code"] == "invalid_setting"
    assert "sparse_policy" in unknown["message"]
    served = run("serve", data_dir=tmp_path / "data", FOREWORD_PORT="0", FOREWORD_HEAD_CONFIG=str(heads))
    error_of(served)
    assert "1 layers of 1 heads" in served.stderr
    short = tmp_path / "short.txt"
    short.write_text("Too little.")
    profile = ("profile", "--text", str(short), "--out", str(heads))
    assert error_of(run(*profile, data_dir=data_dir))["code"] == "invalid_request"
