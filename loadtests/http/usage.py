"""What the processes and the data folder of a server hold: memory, handles, threads, bytes on disk."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from loadtests.http.server import LocalServer


@dataclass(frozen=True)
class ProcessUsage:
    """`uss_bytes`: what would be free if it ended; files it maps count in `rss_bytes` only."""

    pid: int
    rss_bytes: int
    uss_bytes: int
    handles: int
    threads: int


def usage_of(process: psutil.Process | None) -> ProcessUsage | None:
    """None where there is none, or where it ends meanwhile."""
    if process is None:
        return None
    try:
        memory = process.memory_full_info()
        return ProcessUsage(process.pid, memory.rss, memory.uss, process.num_fds(), process.num_threads())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def disk_usage(data_dir: Path) -> dict[str, int]:
    """Bytes of each entry of the data folder, whole trees added up; a file that goes meanwhile counts nothing.

    `kv` is what the cap is of; its index, a database, is `kv_index`.
    """
    sizes = {entry.name: _size(Path(entry.path)) for entry in os.scandir(data_dir)}
    sizes["kv_index"] = sum(_size(path) for path in (data_dir / "kv").glob("index.sqlite3*"))
    sizes["kv"] = max(0, sizes.get("kv", 0) - sizes["kv_index"])
    return sizes


def _size(path: Path) -> int:
    try:
        if not path.is_dir():
            return path.stat().st_size
        return sum(_size(Path(entry.path)) for entry in os.scandir(path))
    except FileNotFoundError:
        return 0


class Sampler:
    """A thread that takes a sample each `every_s` and each `every_requests`, whichever comes first.

    Stopped and continued, as a process may be, it takes none for the time between: `awake_s` leaves such gaps out.
    """

    def __init__(
        self, server: LocalServer, requests: Callable[[], int], *, every_s: float, every_requests: int, out: Path
    ) -> None:
        self._server, self._requests = server, requests
        self._every_s, self._every_requests = every_s, every_requests
        self._out = out
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self.samples: list[dict[str, Any]] = []
        self.awake_s = 0.0

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        # In a file too, line by line: a run that is cut off has its samples.
        with self._out.open("w", encoding="utf-8") as out:
            sampled_s, sampled_requests, tick = float("-inf"), 0, time.monotonic()
            while not self._stop.wait(0.2):
                now, done = time.monotonic(), self._requests()
                self.awake_s += min(now - tick, 5.0)
                tick = now
                if self.awake_s - sampled_s < self._every_s and done - sampled_requests < self._every_requests:
                    continue
                sampled_s, sampled_requests = self.awake_s, done
                self.samples.append(self._sample(done))
                out.write(_line(self.samples[-1]))
                out.flush()

    def _sample(self, done: int) -> dict[str, Any]:
        api, worker = usage_of(self._server.api), usage_of(self._server.worker)
        return {
            "at_s": round(self.awake_s, 1),
            "requests": done,
            "api": asdict(api) if api else None,
            "worker": asdict(worker) if worker else None,
            "disk": disk_usage(self._server.data_dir),
        }


def _line(sample: dict[str, Any]) -> str:
    return json.dumps(sample) + "\n"
