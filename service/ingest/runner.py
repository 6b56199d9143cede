"""Starts the ingesting child process, watches it, publishes what it wrote."""

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from service.ingest import landlock
from service.ingest.base import KINDS, IngestError, IngestLimits, IngestOptions, IngestSummary, Kind, Source
from service.ingest.environment import child_environment
from service.ingest.reports import log_report
from service.logs import current_fields

log = logging.getLogger(__name__)

PUBLISHED = ("document.txt", "tokens.npy", "offsets.npy", "manifest.json")  # the manifest last: it says "complete"


def ingest(
    sources: Sequence[Source],
    out_dir: Path,
    *,
    kind: Kind,
    tokenizer_file: Path,
    limits: IngestLimits | None = None,
    options: IngestOptions | None = None,
    base_manifest: Path | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> IngestSummary:
    """Turn `sources` into one document in `out_dir`; see the package's docstring.

    `progress` gets (fraction 0–1, what is being read) from time to time, in the calling thread; what it raises ends
    the ingest and is passed on. With `base_manifest` unchanged files keep the base's order and changed or new ones
    go to the end. Raises IngestError; `out_dir` is then as it was.
    """
    if not sources:
        raise IngestError("empty_input", "no file was given")
    if kind not in KINDS:
        raise IngestError("unsupported_format", f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    for source in sources:
        if not source.path.exists():
            raise IngestError("not_found", f"there is no file or directory {str(source.path)!r}")
    limits, options = limits or IngestLimits(), options or IngestOptions()
    _tell_what_is_missing()
    out_dir = out_dir.absolute()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".ingest-", dir=out_dir.parent, ignore_cleanup_errors=True) as scratch_name:
        scratch = Path(scratch_name)
        request = {
            "sources": [{"path": str(s.path.absolute()), "filename": s.filename} for s in sources],
            "scratch": str(scratch),
            "kind": kind,
            "tokenizer_file": str(tokenizer_file.absolute()),
            "limits": asdict(limits),
            "options": asdict(options),
            "base_manifest": str(base_manifest.absolute()) if base_manifest else None,
            "request_id": current_fields().get("request_id"),
        }
        result = _run_child(request, scratch, limits, progress or _silent)
        _publish(scratch / "out", out_dir)
    return IngestSummary(seconds=round(time.monotonic() - started, 3), **result)


# How Python, Rust, C++ and the thread library say that there is no memory left.
OUT_OF_MEMORY = ("MemoryError", "memory allocation", "bad_alloc", "can't start new thread", "Cannot allocate memory")


@cache
def _tell_what_is_missing() -> None:
    """Once a process."""
    if not landlock.version():
        log.warning(
            "this kernel has no Landlock: what reads uploads isn't kept from other files that this user can read"
        )


def _silent(fraction: float, note: str) -> None:
    return None


def _run_child(
    request: dict[str, Any], scratch: Path, limits: IngestLimits, progress: Callable[[float, str], None]
) -> dict[str, Any]:
    # A lean interpreter instead of a fork: the caller may have torch, threads and a CUDA context. Our end of stdin
    # stays open while we live; the child ends itself and its parsers when that closes.
    with open(scratch / "stderr", "wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-s", "-m", "service.ingest.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=scratch,
            env=child_environment(scratch),
            start_new_session=True,
        )
    assert child.stdin is not None
    assert child.stdout is not None
    timed_out = threading.Event()

    def expire() -> None:
        timed_out.set()
        _kill_group(child)

    timer = threading.Timer(limits.timeout_s, expire)
    timer.daemon = True
    timer.start()
    answer: dict[str, Any] | None = None
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
        for line in child.stdout:
            message = json.loads(line)
            if "progress" in message:
                progress(message["progress"], message["note"])
            elif "began" in message or "crashed" in message:
                log_report(message, child.pid, request["request_id"])
            else:
                answer = message
        child.wait()
    finally:
        timer.cancel()
        _kill_group(child)
        child.wait()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        child.stdout.close()
    if timed_out.is_set():
        raise IngestError("ingest_timeout", f"reading took longer than the limit of {limits.timeout_s:g} s")
    if answer is None:
        raise _crash(child.returncode, (scratch / "stderr").read_text(errors="replace"), limits)
    if "error" in answer:
        raise IngestError(answer["error"]["code"], answer["error"]["message"])
    result: dict[str, Any] = answer["result"]
    return result


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _crash(returncode: int, stderr: str, limits: IngestLimits) -> IngestError:
    if any(sign in stderr for sign in OUT_OF_MEMORY):
        return IngestError(
            "ingest_memory", f"reading needs more than the limit of {limits.memory_bytes} bytes of memory"
        )
    cause = f"signal {-returncode}" if returncode < 0 else f"exit status {returncode}"
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "no message")
    return IngestError("ingest_failed", f"the reading process ended with {cause}: {last[:300]}")


def _publish(made: Path, out_dir: Path) -> None:
    """Move the finished files into place. A fresh folder appears at once; an existing one gets its manifest last."""
    for name in PUBLISHED:
        with open(made / name, "rb") as file:
            os.fsync(file.fileno())
    try:
        os.rename(made, out_dir)
    except OSError:  # it exists already and holds something
        out_dir.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (out_dir / "manifest.json").unlink()
        for name in PUBLISHED:
            os.replace(made / name, out_dir / name)
        shutil.rmtree(made, ignore_errors=True)
    folder = os.open(out_dir.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
