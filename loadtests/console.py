"""How soon the console shows something with 1,000 documents on its shelf. Writes loadtests/results/summary.json.

    python -m loadtests.console         a real server, its database filled, and Chromium (Debian's, or --chromium PATH)

Each sample is a browser context of its own, so nothing comes from a cache.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import httpx
from playwright.sync_api import Browser, sync_playwright

from loadtests.results import write_entry
from service.database import Database, database_path
from service.documents.base import DocumentRecord, FileRecord, PrefillRecord
from service.documents.sqlite import SqliteDocuments
from service.queue.base import Effects, NewJob, RecordChange
from service.queue.sqlite_queue import SqliteQueue

DOCUMENTS = 1000
SAMPLES = 7
# Notes when the first row, and when all of them, are in the page; runs before its own scripts.
WATCH = """
new MutationObserver(() => {
  const rows = document.getElementsByClassName("row-button").length;
  if (rows) window.firstRow ??= performance.now();
  if (rows >= %d) window.allRows ??= performance.now();
}).observe(document, { childList: true, subtree: true });
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="First paint of the console with 1,000 documents")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        fill(data_dir)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        server = subprocess.Popen(
            [sys.executable, "-m", "foreword", "serve", "--port", str(port)],
            env={**os.environ, "FOREWORD_DATA_DIR": str(data_dir), "FOREWORD_LOG_LEVEL": "warning"},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, server)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
                samples = [paint(browser, url) for _ in range(SAMPLES + 1)][1:]  # the first one starts processes
                chromium = browser.version
                browser.close()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
    for index, name in enumerate(("first_paint", "first_row", "all_rows")):
        seconds = [sample[index] / 1000 for sample in samples]
        figure = f"console_{name}_1000_documents_s"
        print(f"{figure}: {median(seconds):.3f} s ({min(seconds):.3f}–{max(seconds):.3f})")
        write_entry(
            figure,
            median(seconds),
            "s",
            better="lower",
            samples=seconds,
            command="python -m loadtests.console",
            chromium=chromium,
        )
    return 0


def fill(data_dir: Path) -> None:
    """Documents as they are when their KV was made; their folders aren't looked at for a list."""
    database = Database(database_path(data_dir))
    documents, queue, now = SqliteDocuments(database), SqliteQueue(database), time.time()
    for number in range(DOCUMENTS):
        document = DocumentRecord(
            id=f"doc-{number:024x}",
            tenant="local",
            content_hash=f"{number:064x}",
            stream_hash=f"{number:064x}",
            tokenizer_digest="",
            num_tokens=1000 * (number + 1),
            folder=f"documents/{number}",
            created_at=now - number,
            stage_seconds={"upload": 0.1, "ingest": 0.5},
        )
        prefill = PrefillRecord(
            id=f"{document.id}:default",
            document_id=document.id,
            tenant="local",
            fidelity="default",
            state="ready",
            job_id=None,
            num_tokens=document.num_tokens,
            digest="",
            density=0.4,
            recall={"target": 0.95, "mean": 0.96, "p5": 0.95, "worst": 0.93, "below_target": False},
            heads={"block_sparse": 90},
            cached_tokens=0,
            layers_recomputed=0,
            cold_ttft_s=9.0,
            seconds=8.0,
            error=None,
        )
        changes = [RecordChange("documents", document.id, asdict(document))]
        changes.append(RecordChange("prefills", prefill.id, asdict(prefill)))
        queue.put(NewJob("ingest", "filling", {}, job_id=f"filling-{number}"), Effects(changes))
        queue.cancel(f"filling-{number}")
        documents.create_file(handle(number, now, document.id))
    queue.close()
    database.close()


def handle(number: int, now: float, document_id: str | None) -> FileRecord:
    return FileRecord(
        id=f"file-{number:024x}",
        tenant="local",
        filename=f"contract {number:04}.pdf",
        purpose="user_data",
        size_bytes=4000 * (number + 1),
        created_at=now - number,
        expires_at=None,
        kind="auto",
        fidelity="default",
        priority=0,
        base=None,
        pinned=False,
        kv_ttl_s=None,
        sources=[],
        status="processed",
        status_details=None,
        error=None,
        ingest_job=None,
        document_id=document_id,
    )


def wait_until_ready(url: str, server: "subprocess.Popen[bytes]") -> None:
    while server.poll() is None:
        try:
            if httpx.get(f"{url}/readyz", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the server ended with {server.returncode}")


def paint(browser: Browser, url: str) -> tuple[float, float, float]:
    """Milliseconds from the navigation to: the first contentful paint, the first row, all rows."""
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script(WATCH % DOCUMENTS)
    page.goto(url)
    page.locator(".row-button").nth(DOCUMENTS - 1).wait_for(state="attached")
    times: list[float] = page.evaluate(
        "[performance.getEntriesByName('first-contentful-paint')[0].startTime, window.firstRow, window.allRows]"
    )
    context.close()
    return times[0], times[1], times[2]


if __name__ == "__main__":
    sys.exit(main())
