"""The ingesting process: one request on stdin, progress and the result as JSON lines on stdout.

collect (sources → entries) → judge (what is left out) → order → read (entries → text) → stream (→ tokens) → manifest
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from service.ingest import landlock, reports, sandbox
from service.ingest.assemble import Assembler
from service.ingest.base import IngestError, IngestLimits, IngestOptions, Source
from service.ingest.collect import Attachment, Collection, Collector, Opened, Opener
from service.ingest.names import display_name
from service.ingest.ocr import Ocr
from service.ingest.office import PROGRAMS, Office
from service.ingest.order import content_hash, keep_base_order
from service.ingest.pool import ParserPool, available_cores
from service.ingest.sections import Reader
from service.ingest.spool import Entry, Spool
from service.ingest.stream import TokenStream
from service.ingest.token_bytes import TextTokenizer

TOOLS = ("git", "tesseract", *PROGRAMS)
COLLECT_SHARE = 0.2  # of the progress
PROGRESS_EVERY_S = 0.2
MAX_IGNORED_TOLD = 1000
# Reasons that name what is wrong with an input of one kind of fault; anything else is "nothing readable in it".
SPEAKING_REASONS = frozenset(
    [
        "archive_bomb",
        "archive_corrupt",
        "archive_encrypted",
        "archive_unsafe_path",
        "bundle_missing_prerequisite",
        "document_corrupt",
        "document_too_large",
        "empty_input",
        "needs_ocr",
        "password_required",
        "unsupported_archive",
        "unsupported_format",
    ]
)
SINGLE_FILE_REASONS = {
    "binary": "unsupported_format",
    "entry_encrypted": "archive_encrypted",
    "entry_corrupt": "archive_corrupt",
    "parser_crashed": "document_corrupt",
    "parser_timeout": "document_corrupt",
    "document_too_large": "too_large",
}


class Progress:
    """Tells the parent how far it is, not too often."""

    def __init__(self) -> None:
        self._last = 0.0
        self._share = 0.0

    def __call__(self, fraction: float, note: str) -> None:
        now = time.monotonic()
        if now - self._last >= PROGRESS_EVERY_S or fraction >= 1.0:
            self._last, self._share = now, max(self._share, fraction)
            _say({"progress": round(self._share, 4), "note": note})


def _say(message: dict[str, Any]) -> None:
    os.write(_OUT, json.dumps(message).encode() + b"\n")


_OUT = 1


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Do what the request says; returns the fields of the summary. Raises IngestError."""
    limits = IngestLimits(**request["limits"])
    limits = replace(limits, workers=limits.workers or min(available_cores(), 8))
    options = IngestOptions(**request["options"])
    scratch = Path(request["scratch"])
    out = scratch / "out"
    out.mkdir()
    os.environ["RAYON_NUM_THREADS"] = str(limits.workers)
    progress = Progress()
    ocr = Ocr.find() if options.ocr == "auto" else None
    office = Office.find() if options.office == "auto" else None
    spool = Spool(scratch / "spool")
    pool = ParserPool(limits.workers, documents=spool.folder, scratch=scratch / "parsed")
    pool.scratch.mkdir()
    try:
        sources = [Source(Path(s["path"]), s["filename"]) for s in request["sources"]]
        collector = Collector(spool, limits, options, _opener(pool), lambda f, note: progress(f, note))
        collection = collector.collect(sources, request["kind"])
        reader = Reader(collection.kind, spool, pool, limits, options, ocr, office)
        entries = collection.entries
        for entry in entries:
            reader.judge(entry)
        if request["base_manifest"]:
            entries = keep_base_order(entries, Path(request["base_manifest"]))
        stream = TokenStream(out, TextTokenizer(Path(request["tokenizer_file"])), max_tokens=limits.max_tokens)
        assembler = Assembler(stream, reader, options)
        try:
            _read_all(entries, reader, assembler, progress, ahead=2 * limits.workers)
            _check_readable(entries, collection)
            tree = assembler.write_tree()
            stream_hash = stream.close()
        except BaseException:
            stream.abandon()
            raise
    finally:
        pool.close()
        spool.close()
    rows = assembler.manifest_rows()
    manifest = {
        "version": 1,
        "kind": collection.kind,
        "content_hash": content_hash(collection.kind, options, entries, programs=reader.programs()),
        "stream_hash": stream_hash,
        "num_tokens": stream.num_tokens,
        "tokenizer_file": request["tokenizer_file"],
        "options": request["options"],
        "tree": {"token_start": stream.token_at(tree[0]), "token_end": stream.token_at(tree[1])},
        "files": rows,
        "ignored": {
            "count": len(collection.ignored),
            "paths": [display_name(p) for p in collection.ignored[:MAX_IGNORED_TOLD]],
        },
        "warnings": collection.warnings,
    }
    with open(out / "manifest.json", "w", encoding="utf-8") as file:
        file.write(json.dumps(manifest, ensure_ascii=False))  # `dump` would take the slow, pure Python way
    codes = Counter(w["code"] for row in rows for w in row["warnings"]) + Counter(
        w["code"] for w in collection.warnings
    )
    return {
        "kind": collection.kind,
        "content_hash": manifest["content_hash"],
        "stream_hash": stream_hash,
        "num_tokens": stream.num_tokens,
        "files_included": sum(row["status"] == "included" for row in rows),
        "files_skipped": sum(row["status"] == "skipped" for row in rows),
        "input_bytes": sum(entry.size for entry in entries),
        "warnings": dict(codes),
    }


def _read_all(
    entries: Sequence[Entry], reader: Reader, assembler: Assembler, progress: Progress, *, ahead: int
) -> None:
    total = sum(entry.size for entry in entries) or 1
    done = 0
    next_ahead = 0
    seen: set[str] = set()
    documents = [entry for entry in entries if entry.reason is None and entry.file is not None]
    unread = 0
    for entry in entries:
        while next_ahead < len(documents) and unread < ahead:
            candidate = documents[next_ahead]
            next_ahead += 1
            # A copy of an earlier document is never parsed again.
            if candidate.digest not in seen:
                seen.add(candidate.digest)
                reader.read_ahead(candidate)
                unread += 1
        progress(COLLECT_SHARE + (1 - COLLECT_SHARE) * done / total, entry.path)
        was_ahead = reader.is_ahead(entry)
        assembler.add(entry)
        unread -= was_ahead
        done += entry.size


def _check_readable(entries: Sequence[Entry], collection: Collection) -> None:
    """An input with nothing to read in it is an error that says why."""
    included = [entry for entry in entries if entry.reason is None]
    if any(entry.size for entry in included):
        return
    left_out = [entry for entry in entries if entry.reason not in (None, "expanded")]
    if not left_out:
        raise IngestError("empty_input", f"all {len(entries)} files are empty")
    reasons = Counter(str(entry.reason) for entry in left_out)
    detail = next((entry.detail for entry in left_out if entry.detail), None)
    if len(reasons) == 1 and not included:
        reason = next(iter(reasons))
        code = SINGLE_FILE_REASONS.get(reason, reason) if len(entries) == 1 else reason
        if code in SPEAKING_REASONS or (len(entries) == 1 and code in SINGLE_FILE_REASONS.values()):
            named = ", ".join(repr(entry.path) for entry in left_out[:5])
            raise IngestError(code, f"{named}: {detail or _MEANINGS.get(code, code)}")
    listed = ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
    names = ", ".join(repr(entry.path) for entry in left_out[:5])
    raise IngestError("no_text", f"nothing readable in {len(entries)} files; left out: {listed} ({names})")


_MEANINGS = {
    "unsupported_format": "not a format that is read; docs/ingest.md lists them",
    "needs_ocr": "its pages are images; install tesseract to have them read",
    "empty_input": "it is empty",
}


def _opener(pool: ParserPool) -> Opener:
    def open_file(file: Path, name: str, format: Literal["mail", "embedded"]) -> Opened:
        request = {"file": str(file), "name": name, "format": format, "scratch": str(pool.scratch), "options": {}}
        opened = Opened("")
        parts: list[str] = []
        for message in pool.submit(request):
            if "text" in message:
                parts.append(message["text"])
            elif "attachment" in message:
                opened.attachments.append(
                    Attachment(message["attachment"]["name"], Path(message["attachment"]["file"]))
                )
            elif "warning" in message:
                opened.warnings.append(message["warning"])
        opened.text = "".join(parts).encode("utf-8", "replace").decode()
        return opened

    return open_file


def _inputs(request: dict[str, Any]) -> list[Path]:
    """What this process may read beside its libraries."""
    files = [*(source["path"] for source in request["sources"]), request["tokenizer_file"], request["base_manifest"]]
    tools = [found for tool in TOOLS if (found := shutil.which(tool))]
    return [*(Path(file) for file in files if file), *landlock.programs(tools)]


def _end_with_parent() -> None:
    """When our stdin closes the parent is gone: end this whole process group."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _first_line() -> bytes:
    """Unbuffered, so that nothing holds a lock on stdin when the interpreter ends."""
    line = b""
    while not line.endswith(b"\n") and (block := os.read(0, 65536)):
        line += block
    return line


def main() -> None:
    global _OUT
    _OUT = os.dup(1)
    os.set_inheritable(_OUT, False)
    os.dup2(2, 1)
    request = json.loads(_first_line())
    limits = request["limits"]
    sandbox.apply(
        memory_bytes=limits["memory_bytes"],
        cpu_s=limits["timeout_s"] * 64,
        file_bytes=2 * limits["max_unpacked_bytes"],
        may_execute=True,
        read=_inputs(request),
        write=[Path(request["scratch"])],
    )
    _end_with_parent()
    _say(reports.began(request))
    try:
        _say({"result": run(request)})
    except IngestError as error:
        _say({"error": {"code": error.code, "message": error.message}})
    except OSError as error:
        if error.errno != 28:
            _say(reports.crashed(request, error))
            raise
        _say({"error": {"code": "disk_full", "message": "the disk has no room for what the input unpacks to"}})
    except Exception as error:
        _say(reports.crashed(request, error))
        raise
    sys.stdout.flush()
    # No waiting for threads: everything is written.
    os._exit(0)


if __name__ == "__main__":
    main()
