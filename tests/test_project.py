"""What holds for the project as a whole: layers, package names, tables that are made and not typed."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


def test_readme_tables_are_made_from_results_and_settings() -> None:
    checked = subprocess.run(
        [sys.executable, "tools/readme_tables.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_result_is_complete() -> None:
    wanted = {"name", "value", "unit", "better", "samples", "device", "versions", "commit", "date", "command"}
    entries = json.loads((ROOT / "loadtests/results/summary.json").read_text())
    assert entries
    assert len({entry["name"] for entry in entries}) == len(entries)
    for entry in entries:
        assert set(entry) >= wanted, entry["name"]
        assert not entry["command"].startswith("/")


def test_transformers_does_not_take_our_kernels_for_the_hub_library() -> None:
    from transformers.utils import is_kernels_available

    import kernels

    assert Path(kernels.__file__).is_relative_to(ROOT)
    assert is_kernels_available() is False
    version = Version(kernels.__version__)
    assert not Version("0.16") <= version < Version("0.17")
    assert not Version("0.18.2") <= version < Version("0.19")


def test_an_api_only_install_needs_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {requirement.split(">")[0].split("=")[0].strip() for requirement in project["dependencies"]}
    assert not core & {"torch", "triton", "transformers", "accelerate", "safetensors"}
    assert any(requirement.startswith("torch>") for requirement in project["optional-dependencies"]["worker"])
