"""Other processes on the same folder: one that writes what the bench writes, and those that die inside a write.

Both are forked from this program before it has threads, and run under the shim like it.
"""

import contextlib
import multiprocessing
import os
import random
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.kv_store import DiskLimits, LocalKVStore
from loadtests.kv_documents import read, write, write_layers
from loadtests.kv_faults.bench import CAP_BYTES, DOCUMENTS, LAYOUT, REFUSALS
from loadtests.kv_faults.shim import Calls, Files, Kind, Shim

_FORK = multiprocessing.get_context("fork")
MOST_WORK = 60  # pieces of work after which a victim that was not killed gives up


class Other:
    """A forked process that answers one order after the other. The last one made is to be closed first."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        self._pipe, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=self._run, args=(target, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def _run(self, target: Any, pipe: Connection, *arguments: Any) -> None:
        self._pipe.close()  # a copy of the other end, which would keep the pipe from ever ending
        target(pipe, *arguments)

    def send(self, *order: Any) -> None:
        self._pipe.send(order)

    def answer(self) -> Any:
        """Raises EOFError where the process has died."""
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)


def write_beside(pipe: Connection, folder: Path) -> None:
    """Orders (document, owner, ending); answers that it begins, then how many segments another had stored meanwhile.

    Its store is open during an order only: between two of them the bench may put another index in place.
    """
    with contextlib.suppress(EOFError, OSError):
        while True:
            document, owner, ending = pipe.recv()
            store = LocalKVStore(folder, LAYOUT, DiskLimits(CAP_BYTES))
            pipe.send("open")
            with contextlib.suppress(*REFUSALS):
                _write_and_end(store, document, owner, ending)
            store.close()
            pipe.send(store.counters.get("duplicate_segments"))


def _write_and_end(store: LocalKVStore, document: int, owner: str, ending: str) -> None:
    links = DOCUMENTS[document]
    if ending == "commit":
        write(store, links, owner=owner)
        return
    writer = store.open_writer(links, first=0, owner=owner)
    start = min(writer.groups_done() * LAYOUT.layers_per_group, LAYOUT.num_layers)
    write_layers(writer, links, range(start, LAYOUT.num_layers), LAYOUT)
    writer.suspend() if ending == "suspend" else writer.abort()


def fork_victims(pipe: Connection, shim: Shim, folder: Path) -> None:
    """Orders (seed, files, calls, calls to let pass); answers whether the forked process died of its kill."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            order = pipe.recv()
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    _work_until_killed(shim, folder, *order)
                    status = 0
                finally:
                    os._exit(status)
            _, status = os.waitpid(child, 0)
            if os.waitstatus_to_exitcode(status) == 1:
                raise RuntimeError(f"a victim failed by itself: {order}")
            pipe.send(os.waitstatus_to_exitcode(status) == -signal.SIGKILL)


def _work_until_killed(shim: Shim, folder: Path, seed: int, files: Files, calls: Calls, after: int) -> None:
    rng = random.Random(seed)
    store = LocalKVStore(folder, LAYOUT, DiskLimits(CAP_BYTES))
    shim.arm(Kind.KILL, files, calls, after=after, seed=seed)
    for _ in range(MOST_WORK):
        number = rng.randrange(len(DOCUMENTS))
        links, holder = DOCUMENTS[number], f"document {number}"
        with contextlib.suppress(*REFUSALS):
            action = rng.choice(["write", "write", "suspend", "read", "release"])
            if action == "write":
                write(store, links, owner=f"job {number}")
                store.attach(links, holder, ttl_s=None, pinned=False)
            elif action == "suspend":
                _write_and_end(store, number, f"job {number}", "suspend")
            elif action == "read":
                read(store, links)
            else:
                store.release(holder)
