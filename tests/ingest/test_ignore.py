"""Ignore rules against real git, on random trees and rules."""
# ruff: noqa: E501 (inputs are written as they stand in files)

import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from service.ingest import IngestOptions
from service.ingest.ignore import IgnoreRules
from tests.ingest.conftest import Read

NAMES = [
    "a",
    "b",
    "ab",
    "a.log",
    "b.txt",
    "foo",
    "bar",
    "build",
    "doc",
    "[x]",
    "x y",
    "#h",
    "!n",
    "a-b",
    ".hid",
    "A",
    "Foo.TXT",
    "a]b",
    "tr ",
]
PARTS = [
    "a", "b", "foo", "bar", "*", "**", "?", "/", "[ab]", "[!a]", "[^b]*", "[a-f]", ".log", ".txt", "build", "/**/", "**/", "/**", "\\#", "\\!",
    "[[:alpha:]]", "[[:foo:]]", "[]-a]", "\\", "[", "] ", "-", " ", "\\ ", "[a-]", "[z-a]", "x", ".", "!", "#", "[\\]]", "*.*", "***",
]  # fmt: skip

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def _git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True).stdout


def _random_tree(rnd: random.Random, root: Path) -> list[str]:
    files = []
    for _ in range(60):
        path = "/".join(rnd.choice(NAMES) for _ in range(rnd.randint(1, 4)))
        try:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch(exist_ok=False)
        except OSError:
            continue
        files.append(path)
    return files


def _random_rules(rnd: random.Random) -> str:
    lines = []
    for _ in range(rnd.randint(1, 6)):
        line = "".join(rnd.choice(PARTS) for _ in range(rnd.randint(1, 5)))
        if rnd.random() < 0.3:
            name = rnd.choice(NAMES)
            line = rnd.choice([name, f"/{name}", f"{name}/", f"{name}/{rnd.choice(NAMES)}"])
        line = (
            ("!" if rnd.random() < 0.25 else "")
            + line
            + (rnd.choice([" ", "\\ ", "\t", "\r", " \\ "]) if rnd.random() < 0.1 else "")
        )
        lines.append(line)
    return "\n".join(lines) + rnd.choice(["", "\n"])


@needs_git
@pytest.mark.parametrize("seed", range(12))
def test_same_answer_as_git(tmp_path: Path, seed: int) -> None:
    rnd = random.Random(seed)
    _git(tmp_path, "init", "-q")
    files = _random_tree(rnd, tmp_path)
    folders = ["", *sorted({f.rpartition("/")[0] for f in files} - {""})]
    rules = IgnoreRules()
    for folder in rnd.sample(folders, min(3, len(folders))):
        content = _random_rules(rnd)
        (tmp_path / folder / ".gitignore").write_bytes(content.encode())
        rules.add(folder, content.encode())
    listed = _git(tmp_path, "ls-files", "-z", "--others", "--exclude-per-directory=.gitignore").split(b"\0")
    kept = {name.decode() for name in listed}
    assert {f for f in files if not rules.ignores_file(f)} == {f for f in files if f in kept}


def test_hostile_patterns_are_answered_at_once() -> None:
    rules = IgnoreRules()
    rules.add("", b"*a*a*a*a*a*a*a*a*a*a*a*a*a*b\n**/a/**/a/**/a/**/a/**/a/**/a/**/b\n" + b"[" * 5000 + b"\n")
    started = time.monotonic()
    assert not rules.ignores_file("a" * 250)
    assert not rules.ignores_file("a/" * 200 + "c")
    assert time.monotonic() - started < 2


@needs_git
def test_a_working_tree_reads_like_git_sees_it(read: Read, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    files = {
        ".gitignore": "*.log\nbuild/\n!keep.log\n",
        "a.py": "A = 1\n",
        "x.log": "X\n",
        "keep.log": "KEPT\n",
        "tracked.log": "TRACKED\n",
        "build/out.js": "OUT\n",
        "build/forced.js": "FORCED\n",
        "sub/.gitignore": "/only_here.txt\n",
        "sub/only_here.txt": "NOT HERE\n",
        "sub/deep/only_here.txt": "HERE\n",
        ".git_not/x.py": "X = 1\n",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    _git(root, "init", "-q")
    (root / ".git" / "info").mkdir(exist_ok=True)
    (root / ".git" / "info" / "exclude").write_text("/.git_not/\n")
    _git(root, "add", "-f", "tracked.log", "build/forced.js", "a.py")
    document = read(root, name="tree")
    assert {row["path"] for row in document.manifest["files"]} == {
        ".gitignore", "a.py", "keep.log", "tracked.log", "build/forced.js", "sub/.gitignore", "sub/deep/only_here.txt"
    }  # fmt: skip
    assert set(document.manifest["ignored"]["paths"]) == {"x.log", "build/out.js", "sub/only_here.txt", ".git_not/"}
    everything = read(root, name="tree", options=IngestOptions(ocr="off", include_ignored=True))
    assert "OUT\n" in everything.text


def test_ignore_files_with_marks_and_other_encodings(read: Read) -> None:
    document = read({".gitignore": b"\xef\xbb\xbfdropped.txt\n", "dropped.txt": "DROPPED\n", "kept.txt": "KEPT\n"})
    assert "DROPPED" not in document.text
    wide = read({".gitignore": b"\xff\xfe" + "dropped.txt\n".encode("utf-16-le"), "kept.txt": "KEPT\n"})
    assert "KEPT" in wide.text
