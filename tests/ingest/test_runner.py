"""The child process: its limits, its end, what it leaves behind, and the command in front of it."""
# ruff: noqa: E501 (inputs are written as they stand in files)

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from service.ingest import IngestError, IngestLimits, IngestOptions, Source, child, ingest, landlock, runner
from service.ingest.pool import ParserPool
from tests.ingest.makers import make_pdf, make_zip, text_at

ROOT = Path(__file__).resolve().parents[2]


def run(path: Path, out: Path, tokenizer_file: Path, **options: object) -> object:
    return ingest([Source(path, path.name)], out, kind="auto", tokenizer_file=tokenizer_file, **options)  # type: ignore[arg-type]


def test_files_appear_at_once_with_progress_and_nothing_is_left(tmp_path: Path, tokenizer_file: Path) -> None:
    upload, out = tmp_path / "a.zip", tmp_path / "documents" / "d1"
    upload.write_bytes(make_zip({"a.py": "x = 1\n" * 1000, "b.pdf": make_pdf([text_at(72, 700, "Words")])}))
    told: list[tuple[float, str]] = []
    seen: list[bool] = []

    def progress(fraction: float, note: str) -> None:
        told.append((fraction, note))
        seen.append(out.exists())

    summary = ingest([Source(upload, "a.zip")], out, kind="repo", tokenizer_file=tokenizer_file, progress=progress)
    assert sorted(p.name for p in out.iterdir()) == ["document.txt", "manifest.json", "offsets.npy", "tokens.npy"]
    assert list(out.parent.iterdir()) == [out]
    assert told == sorted(told, key=lambda t: t[0])
    assert told
    assert not any(seen)
    assert summary.files_included == 2
    again = ingest([Source(upload, "a.zip")], out, kind="repo", tokenizer_file=tokenizer_file)
    assert again.stream_hash == summary.stream_hash


def test_several_sources_make_one_document(tmp_path: Path, tokenizer_file: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.zip"
    first.write_text("first\n")
    second.write_bytes(make_zip({"x/y.txt": "second\n"}))
    out = tmp_path / "out"
    ingest([Source(first, "a.txt"), Source(second, "b.zip")], out, kind="auto", tokenizer_file=tokenizer_file)
    manifest = json.loads((out / "manifest.json").read_text())
    assert [row["path"] for row in manifest["files"]] == ["a.txt", "b.zip!/x/y.txt"]
    assert manifest["kind"] == "bundle"


def test_errors_leave_an_older_document_alone(tmp_path: Path, tokenizer_file: Path) -> None:
    good, bad, out = tmp_path / "good.txt", tmp_path / "bad.zip", tmp_path / "out"
    good.write_text("good\n")
    bad.write_bytes(b"PK\x03\x04" + bytes(100))
    run(good, out, tokenizer_file)
    with pytest.raises(IngestError, match="zip"):
        run(bad, out, tokenizer_file)
    assert "good" in (out / "document.txt").read_text()
    with pytest.raises(IngestError) as missing:
        run(tmp_path / "none", out, tokenizer_file)
    assert missing.value.code == "not_found"


def test_time_and_memory_are_limited_and_the_group_is_killed(tmp_path: Path, tokenizer_file: Path) -> None:
    upload = tmp_path / "a.zip"
    upload.write_bytes(make_zip({f"{i}.md": os.urandom(40_000).hex() for i in range(120)}))
    started = time.monotonic()
    with pytest.raises(IngestError) as late:
        run(upload, tmp_path / "out", tokenizer_file, limits=IngestLimits(timeout_s=0.4))
    assert late.value.code == "ingest_timeout"
    assert time.monotonic() - started < 20
    assert not (tmp_path / "out").exists()


def test_a_caller_that_raises_in_progress_stops_the_child(tmp_path: Path, tokenizer_file: Path) -> None:
    upload = tmp_path / "a.txt"
    upload.write_text("words\n")

    def cancel(fraction: float, note: str) -> None:
        raise KeyError("cancelled")

    with pytest.raises(KeyError, match="cancelled"):
        run(upload, tmp_path / "out", tokenizer_file, progress=cancel)
    assert not (tmp_path / "out").exists()


def test_it_works_from_a_thread(tmp_path: Path, tokenizer_file: Path) -> None:
    upload = tmp_path / "a.txt"
    upload.write_text("words\n")
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(run(upload, tmp_path / "out", tokenizer_file)))
    thread.start()
    thread.join(60)
    assert len(results) == 1


def test_a_parser_that_dies_costs_its_document(tmp_path: Path) -> None:
    file = tmp_path / "a.pdf"
    file.write_bytes(make_pdf([text_at(72, 700, "Words")]))
    small = tmp_path / "b.pdf"
    small.write_bytes(make_pdf([text_at(72, 700, "Small")]))
    pool = ParserPool(1, documents=tmp_path, scratch=tmp_path)
    request = {"name": "a.pdf", "format": "pdf", "scratch": str(tmp_path), "options": {}}
    try:
        task = pool.submit({**request, "file": str(file)}, spans=True)
        while not pool._processes:
            time.sleep(0.001)
        for parser in list(pool._processes):
            parser._process.kill()  # before it can have answered: it is still starting
        with pytest.raises(IngestError) as crash:
            list(task)
        assert crash.value.code == "parser_crashed"
        texts = [m["text"] for m in pool.submit({**request, "file": str(small)}, spans=True) if "text" in m]
        assert "Small\n" in texts
    finally:
        pool.close()


SANDBOXED = """
import socket, subprocess, sys
from pathlib import Path
from service.ingest import sandbox
folder = Path(sys.argv[1]).parent
filtered = "seccomp" in sandbox.apply(
    memory_bytes=1 << 30, cpu_s=60, file_bytes=1 << 20, may_execute=False, write=[folder]
)
outcome = []
for attempt in (lambda: socket.socket(socket.AF_INET), lambda: socket.socket(socket.AF_UNIX), lambda: subprocess.run(["true"]), lambda: bytearray(2 << 30),
                lambda: open(sys.argv[1], "wb").write(bytes(2 << 20))):
    try:
        attempt()
        outcome.append("done")
    except (OSError, MemoryError) as error:
        outcome.append(type(error).__name__)
print(filtered, outcome)
"""


def test_the_sandbox_has_no_network_no_programs_and_little_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SANDBOXED, str(tmp_path / "big")], capture_output=True, text=True, cwd=ROOT, check=False
    )
    filtered, _, outcome = done.stdout.strip().partition(" ")
    if filtered != "True":
        pytest.skip("this machine has no seccomp filter")
    # A signal of the file-size limit may end the process before the last one is told.
    assert outcome in ("['PermissionError', 'PermissionError', 'PermissionError', 'MemoryError', 'OSError']",), (
        done.stderr
    )


needs_landlock = pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ParserPool]:
    """Real parser processes over two folders of their own."""
    for name in ("documents", "scratch", "elsewhere"):
        (tmp_path / name).mkdir()
    pool = ParserPool(1, documents=tmp_path / "documents", scratch=tmp_path / "scratch")
    yield pool
    pool.close()


@needs_landlock
@pytest.mark.parametrize("target", ["/etc/passwd", "elsewhere/secret.html", "scratch/link"])
def test_a_parser_can_open_nothing_but_its_documents(tmp_path: Path, pool: ParserPool, target: str) -> None:
    (tmp_path / "elsewhere" / "secret.html").write_text("<p>SECRET</p>")
    (tmp_path / "scratch" / "link").symlink_to(tmp_path / "elsewhere" / "secret.html")
    own = tmp_path / "documents" / "own.html"
    own.write_text("<p>OWN</p>")
    request = {"name": "a.html", "format": "html", "scratch": str(pool.scratch), "options": {}}
    assert "OWN\n" in [m.get("text") for m in pool.submit({**request, "file": str(own)})]
    with pytest.raises(IngestError, match="PermissionError"):
        list(pool.submit({**request, "file": str(tmp_path / target)}))


@needs_landlock
@pytest.mark.parametrize("where", ["elsewhere", "documents"])
def test_a_parser_can_write_to_its_scratch_folder_only(tmp_path: Path, pool: ParserPool, where: str) -> None:
    mail = tmp_path / "documents" / "a.eml"
    mail.write_bytes(b"From: a@example.org\nContent-Disposition: attachment; filename=x.bin\nContent-Type: a/b\n\nDATA")
    request = {"file": str(mail), "name": "a.eml", "format": "mail", "options": {}}
    (attached,) = [m["attachment"] for m in pool.submit({**request, "scratch": str(pool.scratch)}) if "attachment" in m]
    assert Path(attached["file"]).read_bytes() == b"DATA"
    with pytest.raises(IngestError, match="PermissionError"):
        list(pool.submit({**request, "scratch": str(tmp_path / where)}))
    assert [p.name for p in (tmp_path / where).iterdir()] == ["a.eml"] * (where == "documents")


CONFINED = """
import os, subprocess, sys
from pathlib import Path
from service.ingest import landlock
held = landlock.restrict(read=[Path(sys.argv[1])], write=[Path(sys.argv[2])], execute=True)
attempts = [
    lambda: open("/etc/passwd"), lambda: open("/proc/self/environ"), lambda: os.listdir("/"), lambda: os.listdir(sys.argv[1]),
    lambda: open(sys.argv[1] + "/new", "w"), lambda: os.truncate(sys.argv[1] + "/old", 0), lambda: os.unlink(sys.argv[1] + "/old"),
    lambda: os.rename(sys.argv[2] + "/mine", sys.argv[1] + "/mine"), lambda: open(sys.argv[2] + "/new", "w"),
    lambda: subprocess.run(["cat", "/etc/passwd"], capture_output=True, check=True),
    lambda: subprocess.run(["cat", sys.argv[1] + "/old"], capture_output=True, check=True),
    lambda: subprocess.run([sys.argv[2] + "/mine"], check=True),
]
for attempt in attempts:
    try:
        attempt()
        print("done")
    except (OSError, subprocess.CalledProcessError) as error:
        print("refused" if isinstance(error, subprocess.CalledProcessError) or error.errno in (13, 18) else error)
"""


@needs_landlock
def test_landlock_holds_for_the_process_and_what_it_starts(tmp_path: Path) -> None:
    readable, writable = tmp_path / "read", tmp_path / "write"
    readable.mkdir()
    writable.mkdir()
    (readable / "old").write_text("old")
    (writable / "mine").write_text("#!/bin/sh\n")
    (writable / "mine").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", CONFINED, str(readable), str(writable)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    refused, done_ = "refused", "done"
    truncate = refused if landlock.version() >= 3 else done_
    expected = [refused, refused, refused, done_, refused, truncate, refused, refused, done_, refused, done_, refused]
    assert done.stdout.split() == expected, done.stdout
    assert (readable / "old").exists()


@needs_landlock
def test_the_reading_process_is_confined_too(tmp_path: Path, tokenizer_file: Path) -> None:
    """A folder that is reached over a link in the upload: named, and not even to be opened."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "secret.txt").write_text("SECRET\n")
    (folder / "a.txt").write_text("words\n")
    request = {
        "sources": [{"path": str(folder), "filename": "folder"}], "scratch": str(tmp_path / "scratch"), "kind": "bundle",
        "tokenizer_file": str(outside / "secret.txt"), "limits": asdict(IngestLimits()), "options": asdict(IngestOptions()),
        "base_manifest": None,
    }  # fmt: skip
    allowed = child._inputs(request)
    assert outside not in allowed
    assert {folder, outside / "secret.txt"} <= set(allowed)
    probe = (
        "import json, sys; from pathlib import Path; from service.ingest import child, sandbox; r = json.loads(sys.argv[1]);"
        "sandbox.apply(memory_bytes=1 << 31, cpu_s=60, file_bytes=1 << 20, may_execute=True, read=child._inputs(r),"
        " write=[Path(r['scratch'])]); print(open(sys.argv[2]).read())"
    )
    command = [sys.executable, "-c", probe, json.dumps(request)]
    inside = subprocess.run([*command, str(folder / "a.txt")], capture_output=True, text=True, cwd=ROOT, check=False)
    assert inside.stdout.strip() == "words"
    (outside / "other.txt").write_text("SECRET\n")
    refused = subprocess.run(
        [*command, str(outside / "other.txt")], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert "PermissionError" in refused.stderr
    assert "SECRET" not in refused.stdout


def test_a_kernel_without_landlock_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner._tell_what_is_missing.cache_clear()
    monkeypatch.setattr(landlock, "version", lambda: 0)
    for _ in range(2):
        runner._tell_what_is_missing()
    runner._tell_what_is_missing.cache_clear()
    assert [record.message.split(":")[0] for record in caplog.records] == ["this kernel has no Landlock"]
    assert landlock.restrict(read=[], write=[], execute=False) is False


@pytest.mark.parametrize("limit_mib", [64, 192])
def test_too_little_memory_is_said(tmp_path: Path, tokenizer_file: Path, limit_mib: int) -> None:
    """A real child: under the first limit it can't even begin, under the second it can read short files."""
    upload, short = tmp_path / "a.txt", tmp_path / "short.txt"
    upload.write_text("words " * 1_000_000)
    short.write_text("words\n")
    limits = IngestLimits(memory_bytes=limit_mib << 20, workers=2)
    with pytest.raises(IngestError) as full:
        run(upload, tmp_path / "out", tokenizer_file, limits=limits)
    assert full.value.code == "ingest_memory"
    assert str(limit_mib << 20) in full.value.message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "short.txt"]
    if limit_mib > 64:
        run(short, tmp_path / "out", tokenizer_file, limits=limits)


def test_the_command_tells_errors_as_its_last_line(tmp_path: Path, tokenizer_file: Path) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "foreword.ingest_command", *arguments, "--tokenizer", str(tokenizer_file)],
            capture_output=True, text=True, cwd=ROOT, check=False,
        )  # fmt: skip

    empty = tmp_path / "empty.zip"
    empty.touch()
    refused = command(str(empty), "--out", str(tmp_path / "out"))
    assert refused.returncode == 2
    assert json.loads(refused.stderr.strip().splitlines()[-1])["error"]["code"] == "empty_input"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n")
    done = command(str(folder), "--out", str(tmp_path / "out"), "--kind", "repo", "--mask-secrets")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["options"]["mask_secrets"] is True


def test_importing_it_is_light() -> None:
    probe = "import sys, foreword.ingest_command, service.ingest.locate; print([m for m in ('torch', 'transformers', 'lxml', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_options_reach_the_child(tmp_path: Path, tokenizer_file: Path) -> None:
    upload = tmp_path / "a.zip"
    upload.write_bytes(make_zip({"a.py": "x = 1\n", "yarn.lock": "LOCK\n"}))
    out = tmp_path / "out"
    ingest(
        [Source(upload, "a.zip")],
        out,
        kind="repo",
        tokenizer_file=tokenizer_file,
        options=IngestOptions(include_generated=True),
    )
    assert "LOCK" in (out / "document.txt").read_text()
