"""Entries of loadtests/results/summary.json: one a headline figure, written by the program that measured it."""

import fcntl
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

SUMMARY = Path(__file__).with_name("results") / "summary.json"
# What the programs write is no change of what they measure.
_RESULTS = ":(top,exclude)loadtests/results"
_PACKAGES = ("foreword", "torch", "triton", "transformers", "numpy", "tokenizers")


def write_entry(
    name: str,
    value: float,
    unit: str,
    *,
    better: Literal["lower", "higher"],
    samples: Sequence[float],
    command: str,
    device: str | None = None,
    summary: Path = SUMMARY,
    **details: Any,
) -> None:
    """Put one entry in place of the one of the same name. `details` are further fields beside the fixed ones."""
    entry = {
        "name": name,
        "value": value,
        "unit": unit,
        "better": better,
        "samples": list(samples),
        "device": device or cpu_name(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        **details,
    }
    summary.parent.mkdir(parents=True, exist_ok=True)
    with summary.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = {old["name"]: old for old in read_entries(summary)}
        entries[name] = entry
        with tempfile.NamedTemporaryFile("w", dir=summary.parent, delete=False, encoding="utf-8") as file:
            json.dump([entries[key] for key in sorted(entries)], file, indent=2, ensure_ascii=False)
            file.write("\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, summary)


def read_entries(summary: Path = SUMMARY) -> list[dict[str, Any]]:
    """All entries, [] where none were written yet."""
    if not summary.is_file():
        return []
    entries: list[dict[str, Any]] = json.loads(summary.read_text(encoding="utf-8"))
    return entries


def cpu_name() -> str:
    """The processor's model, its count and the vector extensions that decide bfloat16's speed."""
    model, flags = platform.processor() or platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
            elif line.startswith("flags"):
                flags = line
    except OSError:
        pass
    found = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f") if flag in flags]
    return f"{os.cpu_count()} × {model} ({', '.join(found) or 'no AVX-512'})"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def command_line(module: str, arguments: Sequence[str]) -> str:
    """How a figure is measured again, without this machine's paths."""
    return " ".join([f"python -m {module}", *("FOLDER" if "/" in word else word for word in arguments)])


def commit() -> str:
    """FOREWORD_COMMIT where set, else the checkout's (`+changes` where files differ from it), or nothing."""
    if given := os.environ.get("FOREWORD_COMMIT"):
        return given
    root = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    head = git("rev-parse", "--short=12", "HEAD")
    return head + (
        "+changes" if head and git("status", "--porcelain", "--untracked-files=no", "--", ":/", _RESULTS) else ""
    )
