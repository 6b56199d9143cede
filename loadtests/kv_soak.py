"""The disk cap under a thousand documents: random sizes, pins, reads and kills, in all twenty times the cap and more.

    python -m loadtests.kv_soak [--documents 1000] [--seed 1] [--folder DIR]

Two processes write, read, pin and release; one or the other is killed with SIGKILL at random, and what it was writing
is gone on with. What lies in the folder is added up again and again, with both processes stopped, so that no sum mixes
two moments.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from engine.chain import Segment
from engine.errors import StorageFull
from engine.interfaces import KVLayout
from engine.kv_store import DiskLimits, LocalKVStore
from engine.kv_store.layout import segment_file_bytes
from loadtests.kv_documents import chain_of, read, write
from loadtests.results import command_line, write_entry

COMMAND = command_line("loadtests.kv_soak", sys.argv[1:])
LAYOUT = KVLayout(num_layers=4, bytes_per_token=16, layers_per_group=2)
CAPS_WRITTEN = 22  # all documents together, as a multiple of the cap
SHARED_TOKENS = 4096  # that every third document begins with
PINNED_AT_ONCE = 4
MEAN_ORDERS_PER_KILL = 25
LOOK_S = 0.01  # between two looks at the folder

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Document:
    number: int
    num_tokens: int

    @property
    def links(self) -> list[Segment]:
        shared = min(SHARED_TOKENS, self.num_tokens) if self.number % 3 == 0 else 0
        return chain_of(self.num_tokens, seed=self.number, shared_tokens=shared)

    @property
    def size_bytes(self) -> int:
        return sum(segment_file_bytes(LAYOUT, link.num_tokens) for link in self.links)


@dataclass
class Findings:
    counts: Counter[str] = field(default_factory=Counter)
    looks: int = 0
    most_bytes: int = 0  # that lay in the folder
    overrun_bytes: int = 0  # the most by which they went over the cap
    wrong_blocks: int = 0
    blocks_compared: int = 0


class Worker:
    """A process with a store of its own; killed and started again."""

    def __init__(self, folder: Path, cap_bytes: int) -> None:
        self._folder, self._cap_bytes = folder, cap_bytes
        self.order: tuple[str, Document] | None = None
        self.start()

    def start(self) -> None:
        self.pipe, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=_work, args=(theirs, self._folder, self._cap_bytes), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, action: str, document: Document) -> None:
        self.order = action, document
        self.pipe.send(self.order)

    def kill(self) -> tuple[str, Document] | None:
        """Returns what it was at."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        lost, self.order = self.order, None
        return lost

    def stop(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        while _state(self.process.pid) not in "TZX":
            time.sleep(0.0002)

    def go_on(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)


def _state(pid: int) -> str:
    """T: stopped. A process's threads stop together; the first one's state is shown when all have."""
    states = {
        Path(entry.path, "stat").read_text().rpartition(")")[2].split()[0] for entry in os.scandir(f"/proc/{pid}/task")
    }
    return states.pop() if len(states) == 1 else "R"


def _work(pipe: Connection, folder: Path, cap_bytes: int) -> None:
    store = LocalKVStore(folder, LAYOUT, DiskLimits(cap_bytes), host_bytes=1024**2)
    with contextlib.suppress(EOFError, OSError):
        while True:
            action, document = pipe.recv()
            pipe.send(_do(store, action, document))


def _do(store: LocalKVStore, action: str, document: Document) -> tuple[str, int, int]:
    """What became of it, blocks compared, blocks wrong."""
    holder = str(document.number)
    if action in ("write", "pin"):
        try:
            write(store, document.links, owner=f"job {document.number}")
        except StorageFull:
            return "no room", 0, 0
        store.attach(document.links, holder, ttl_s=None, pinned=action == "pin")
    elif action == "unpin":
        store.set_policy(holder, ttl_s=None, pinned=False)
    elif action == "release":
        store.release(holder)
    elif action == "sweep":
        store.sweep()
    elif action == "read":
        served = read(store, document.links)
        return "read" if served.segments else "miss", served.blocks, served.wrong
    return action, 0, 0


class Soak:
    def __init__(self, folder: Path, documents: list[Document], cap_bytes: int, seed: int) -> None:
        self._folder, self._cap_bytes, self._rng = folder, cap_bytes, random.Random(seed)
        self._to_write = deque(documents)
        self._written: list[Document] = []
        self._pinned: deque[Document] = deque()
        self._short_of_room = False
        self.findings = Findings()
        self._workers = [Worker(folder, cap_bytes) for _ in range(2)]

    def run(self) -> Findings:
        total = len(self._to_write)
        while self._to_write or any(worker.order for worker in self._workers):
            for worker in self._workers:
                if worker.order is None:
                    worker.give(*self._next_order())
            self._listen()
            self._look()
            if self._rng.random() < 1 / MEAN_ORDERS_PER_KILL:
                self._kill(self._rng.choice(self._workers))
            if self.findings.looks % 1000 == 0:
                print(f"{len(self._written)} of {total} documents, {dict(self.findings.counts)}", flush=True)
        self._look()
        for worker in self._workers:
            worker.kill()
        return self.findings

    def _next_order(self) -> tuple[str, Document]:
        recent = self._written[-40:]
        draw = self._rng.random()
        if self._pinned and (self._short_of_room or len(self._pinned) > PINNED_AT_ONCE):
            self._short_of_room = False
            return "unpin", self._pinned.popleft()
        if not self._to_write or (recent and draw < 0.4):
            return "read", self._rng.choice(recent)
        if recent and draw < 0.45:
            return "release", self._rng.choice(
                [document for document in recent if document not in self._pinned] or recent
            )
        if draw < 0.48:
            return "sweep", self._to_write[0]
        return "pin" if self._rng.random() < 0.1 else "write", self._to_write.popleft()

    def _listen(self) -> None:
        """Take the answers that are there, waiting a moment for one."""
        for pipe in wait([worker.pipe for worker in self._workers if worker.order], timeout=LOOK_S):
            (worker,) = (worker for worker in self._workers if worker.pipe is pipe)
            assert worker.order is not None
            action, document = worker.order
            outcome, compared, wrong = worker.pipe.recv()
            worker.order = None
            self.findings.counts[outcome] += 1
            self.findings.blocks_compared += compared
            self.findings.wrong_blocks += wrong
            if outcome == "no room":
                self._short_of_room = True
                self._to_write.append(document)
            elif action in ("write", "pin"):
                self._written.append(document)
                if action == "pin":
                    self._pinned.append(document)

    def _look(self) -> None:
        for worker in self._workers:
            worker.stop()
        try:
            used = sum(entry.stat().st_size for entry in os.scandir(self._folder / "blocks"))
        except FileNotFoundError:  # no worker has made it yet
            used = 0
        finally:
            for worker in self._workers:
                worker.go_on()
        findings = self.findings
        findings.looks += 1
        findings.most_bytes = max(findings.most_bytes, used)
        findings.overrun_bytes = max(findings.overrun_bytes, used - self._cap_bytes)

    def _kill(self, worker: Worker) -> None:
        lost = worker.kill()
        self.findings.counts["kill"] += 1
        if lost is not None and lost[0] in ("write", "pin"):
            self.findings.counts["kill while writing"] += 1
            self._to_write.appendleft(lost[1])
        worker.start()


def documents_of(count: int, seed: int) -> list[Document]:
    """From a few tokens to 40 segments, most of them small."""
    rng = random.Random(seed)
    return [Document(number, min(163_840, int(rng.lognormvariate(9.6, 0.9)) + 1)) for number in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="where the store lies; default: the temporary folder")
    parser.add_argument("--no-summary", action="store_true", help="print only")
    arguments = parser.parse_args()
    documents = documents_of(arguments.documents, arguments.seed)
    total_bytes = sum(document.size_bytes for document in documents)
    cap_bytes = max(total_bytes // CAPS_WRITTEN, 3 * max(document.size_bytes for document in documents))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kv-soak-", dir=arguments.folder) as folder:
        findings = Soak(Path(folder) / "kv", documents, cap_bytes, arguments.seed).run()
    overrun = max(0, findings.overrun_bytes)
    details: dict[str, Any] = {
        "documents": len(documents),
        "cap_bytes": cap_bytes,
        "caps_written": round(total_bytes / cap_bytes, 1),
        "most_bytes": findings.most_bytes,
        "looks": findings.looks,
        "counts": dict(findings.counts),
        "wrong_blocks": findings.wrong_blocks,
        "blocks_compared": findings.blocks_compared,
        "seconds": round(time.monotonic() - started),
    }
    print(f"cap overrun: {overrun} bytes; {details}")
    if not arguments.no_summary:
        write_entry("cap_overrun_bytes", overrun, "bytes", better="lower", samples=[], command=COMMAND, **details)
    return int(overrun > 0 or findings.wrong_blocks > 0)


if __name__ == "__main__":
    sys.exit(main())
