"""What one API process bears without any model work: `python -m loadtests.http_api`.

Status requests a second: GET /v1/documents/{id} of finished documents over kept connections. Open streams: progress
streams of documents that are still read, all of them held open at once; each then gets an event, so none is dead.
The server is `foreword serve` with a worker that does nothing; the client runs beside it, on the other core.
"""

import argparse
import asyncio
import contextlib
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from loadtests.results import write_entry
from service.database import Database, database_path
from service.queue.base import Effects, NewJob, RecordChange
from service.queue.sqlite_queue import SqliteQueue
from service.settings import Settings

COMMAND = "python -m loadtests.http_api"
GIB = 1 << 30
CONNECTIONS = 32
DOCUMENTS = 100
IDLE_WORKER = [sys.executable, "-c", "import signal; signal.pause()"]


def make_records(settings: Settings) -> list[str]:
    """Finished documents, each with a file, a prefill and its figures. Returns the files' ids."""
    database = Database(database_path(settings.data_dir))
    queue, now, ids = SqliteQueue(database), time.time(), []
    for number in range(DOCUMENTS):
        file_id, document_id = f"file-{number:024x}", f"doc-{number:024x}"
        hashes = {"content_hash": "c", "stream_hash": "s", "tokenizer_digest": "d"}
        recall = {"target": 0.95, "mean": 0.96, "p5": 0.9, "worst": 0.8, "below_target": False}
        document = {"tenant": "local", **hashes, "num_tokens": 100_000, "folder": "documents/x", "created_at": now}
        prefill = {"document_id": document_id, "tenant": "local", "fidelity": "default", "state": "ready"}
        prefill |= {"num_tokens": 100_064, "digest": "d", "density": 0.3, "recall": recall, "cold_ttft_s": 12.0}
        file = {"tenant": "local", "filename": "a.txt", "purpose": "user_data", "size_bytes": 400_000}
        file |= {"created_at": now + number, "document_id": document_id, "status": "processed"}
        changes = [
            RecordChange("documents", document_id, document),
            RecordChange("prefills", f"{document_id}:default", prefill),
            RecordChange("files", file_id, file),
        ]
        queue.put(NewJob("ingest", "local", {}, job_id=f"ingest-{number}"), Effects(changes))
        ids.append(file_id)
    for number in range(DOCUMENTS):  # and as many that are still read
        file_id, job_id = f"file-{DOCUMENTS + number:024x}", f"ingest-{number}"
        file = {"tenant": "local", "filename": "b.txt", "purpose": "user_data", "size_bytes": 400_000}
        change = RecordChange("files", file_id, {**file, "created_at": now, "ingest_job": job_id})
        queue.put(NewJob("ingest", "local", {}), Effects([change]))
        ids.append(file_id)
    queue.close()
    database.close()
    return ids


@contextlib.contextmanager
def server(settings: Settings) -> Iterator[tuple[str, psutil.Process]]:
    """Its host and port, and the API process."""
    port = _free_port()
    code = (
        "import sys; from service.serve import serve; from service.settings import Settings; "
        "serve(Settings(), sys.argv[1:])"
    )
    environment = {
        f"FOREWORD_{name.upper()}": str(value) for name, value in settings.model_dump().items() if value is not None
    } | {"FOREWORD_PORT": str(port), "FOREWORD_LOG_LEVEL": "warning"}
    command = [sys.executable, "-c", code, *IDLE_WORKER]
    with subprocess.Popen(command, env={**os.environ, **environment}) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/startupz").status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the server did not start")
                time.sleep(0.1)
            yield f"127.0.0.1:{port}", psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def status_requests(address: str, ids: list[str], seconds: float) -> float:
    """Requests answered with 200 a second."""
    host, _, port = address.partition(":")
    deadline, answered = time.monotonic() + seconds, 0

    async def client(number: int) -> None:
        nonlocal answered
        reader, writer = await asyncio.open_connection(host, int(port))
        turn = number
        while time.monotonic() < deadline:
            turn += 1
            path = f"/v1/documents/{ids[turn % DOCUMENTS]}"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head.decode())
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            answered += 1
        writer.close()

    started = time.monotonic()
    await asyncio.gather(*(client(number) for number in range(CONNECTIONS)))
    return answered / (time.monotonic() - started)


async def open_streams(address: str, ids: list[str], count: int, settings: Settings, api: psutil.Process) -> float:
    """Bytes that the API process grew by while it held `count` streams, every one of which then got an event."""
    host, _, port = address.partition(":")
    before = api.memory_info().rss
    streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open_one(number: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
        path = f"/v1/documents/{ids[DOCUMENTS + number % DOCUMENTS]}/events"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
        await reader.readuntil(b"event: state")
        streams.append((reader, writer))

    for start in range(0, count, 200):
        await asyncio.gather(*(open_one(number) for number in range(start, min(start + 200, count))))
    grown = _grown(api, before)
    print(f"{len(streams)} streams are open, {grown / (1 << 20):.0f} MiB more", flush=True)
    for _ in range(5):  # a while, with heartbeats
        await asyncio.sleep(1.0)
        grown = max(grown, _grown(api, before))
    started = time.monotonic()
    told = asyncio.create_task(asyncio.to_thread(_tell, settings))
    await asyncio.gather(*(_progress(reader) for reader, _ in streams))
    await told
    print(f"all of them got an event within {time.monotonic() - started:.1f} s", flush=True)
    grown = max(grown, _grown(api, before))
    for _, writer in streams:
        writer.close()
    return float(grown)


async def _progress(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(120):
        while not (await reader.readline()).startswith(b"event: progress"):
            pass


def _grown(api: psutil.Process, before: int) -> int:
    return int(api.memory_info().rss) - before


def _tell(settings: Settings) -> None:
    """One event for every document that is still read."""
    database = Database(database_path(settings.data_dir))
    queue = SqliteQueue(database)
    for _ in range(DOCUMENTS):
        job = queue.claim("bench", ["ingest"], lease_s=120)
        assert job is not None
        queue.progress(job, 0.5, {"stage": "ingest"})
    queue.close()
    database.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", choices=["status", "streams"])
    parser.add_argument("--dry", action="store_true", help="print, write no figure")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    folder = Path(tempfile.mkdtemp(prefix="foreword-http-"))
    try:
        settings = Settings(data_dir=folder / "data", disk_floor_bytes=0).resolved()
        ids = make_records(settings)
        with server(settings) as (address, api):
            if arguments.only != "streams":
                rates = []
                for _ in range(arguments.runs + 1):  # the first one warms up
                    rates.append(asyncio.run(status_requests(address, ids, arguments.seconds)))
                    print(f"{rates[-1]:.0f} status requests/s", flush=True)
                if not arguments.dry:
                    write_entry(
                        "status_requests_per_s",
                        statistics.median(rates[1:]),
                        "requests/s",
                        better="higher",
                        samples=rates[1:],
                        command=f"{COMMAND} --only status",
                        connections=CONNECTIONS,
                    )
            if arguments.only != "status":
                grown = asyncio.run(open_streams(address, ids, arguments.streams, settings, api))
                per_gb = arguments.streams * GIB / grown
                print(f"{per_gb:.0f} streams per GiB: {grown / arguments.streams / 1024:.1f} KiB each", flush=True)
                if not arguments.dry:
                    write_entry(
                        "sse_streams_per_gb",
                        per_gb,
                        "streams/GiB",
                        better="higher",
                        samples=[per_gb],
                        command=f"{COMMAND} --only streams",
                        streams=arguments.streams,
                        grown_bytes=grown,
                    )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
