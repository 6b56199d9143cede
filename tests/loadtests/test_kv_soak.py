"""The soak itself: it finds no overrun in the store as it is, and would find one."""

import subprocess
import sys
from pathlib import Path

import pytest

# A store that finds room for everything.
BOUNDLESS = """
import sys
from engine.kv_store.space import DiskSpace
from loadtests import kv_soak

DiskSpace.room = lambda self, db: 2**60
sys.exit(kv_soak.main())
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    arguments = ("--documents", "40", "--folder", str(folder), "--no-summary")
    return subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
def test_a_short_soak_finds_no_overrun(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "loadtests.kv_soak")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cap overrun: 0 bytes" in done.stdout
    assert "'kill while writing'" in done.stdout


@pytest.mark.slow
def test_an_overrun_would_be_noticed(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", BOUNDLESS)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cap overrun: 0 bytes" not in done.stdout
