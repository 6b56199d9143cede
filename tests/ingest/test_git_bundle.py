import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ingest.conftest import Read, error_of

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
AUTHOR = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *AUTHOR, "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    (root / "old.py").write_text("HISTORY = 1\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    (root / "old.py").unlink()
    (root / ".gitignore").write_text("*.log\n")
    (root / "tracked.log").write_text("TRACKED\n")
    (root / 'caf\u00e9 "quoted".py').write_text("QUOTED = 1\n")
    (root / "link").symlink_to("/etc/passwd")
    git(root, "add", "-f", "-A")
    git(root, "update-index", "--add", "--cacheinfo", "160000,1234567890123456789012345678901234567890,libs/sub")
    git(root, "commit", "-qm", "two")
    git(root, "branch", "feature")
    return root


def bundle(root: Path, *references: str) -> Path:
    out = root.parent / f"{'-'.join(r.replace('/', '_').replace('^', 'not') for r in references)}.bundle"
    git(root, "bundle", "create", str(out), *references)
    return out


def test_the_tree_of_head_and_nothing_of_history(read: Read, repository: Path) -> None:
    document = read(bundle(repository, "HEAD", "main"), name="x.bundle", kind="auto")
    assert document.manifest["kind"] == "repo"
    assert document.body("tracked.log") == "TRACKED\n"
    assert document.body('caf\u00e9 "quoted".py') == "QUOTED = 1\n"
    assert "HISTORY" not in document.text
    assert document.reasons() == {"link": "symlink", "libs/sub": "submodule_missing"}
    assert "submodule_missing" in document.codes()


def test_a_bundle_without_head_is_read_from_its_main_branch_with_a_warning(read: Read, repository: Path) -> None:
    document = read(bundle(repository, "feature", "main"), name="x.bundle")
    assert "bundle_without_head" in document.codes()
    assert "TRACKED" in document.text


def test_bundles_that_cannot_be_read(read: Read, repository: Path) -> None:
    thin = bundle(repository, "main", "^main~1")
    assert error_of(lambda: read(thin, name="x.bundle")) == "bundle_missing_prerequisite"
    data = bytearray(bundle(repository, "main").read_bytes())
    assert error_of(lambda: read(bytes(data[:40]), name="x.bundle")) == "archive_corrupt"
    data[len(data) // 2] ^= 0xFF
    assert error_of(lambda: read(bytes(data), name="x.bundle")) == "archive_corrupt"


def test_nothing_of_the_bundle_or_the_user_is_run(
    read: Read, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own configuration with a hook and a filter must not reach the bare repository."""
    mark = tmp_path / "ran"
    home = tmp_path / "home"
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    for name in ("post-checkout", "reference-transaction", "post-index-change"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {mark}\n")
        (hooks / name).chmod(0o755)
    (home / ".gitconfig").write_text(
        f"[core]\n\thooksPath = {hooks}\n\tfsmonitor = touch {mark}\n[init]\n\ttemplateDir = {home}\n"
    )
    file = bundle(repository, "main")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(home / ".gitconfig"))
    assert "TRACKED" in read(file, name="x.bundle").text
    assert not mark.exists()
