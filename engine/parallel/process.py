"""What a rank's process does: opens its model, then follows rank 0's commands until their pipe ends."""

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from engine.chain import Segment
from engine.errors import EngineError, OutOfMemory
from engine.kv_format import KVFormat
from engine.model import Model
from engine.parallel import commands
from engine.parallel.deal import deal
from engine.parallel.link import Link
from engine.parallel.rows import SharedRows
from engine.prefill_rows import RowsInHalves
from engine.sparse.report import AttentionReport
from engine.sparse.settings import SparseSettings

# Rank 0 may do other work for long between two steps of a prefill; its end is noticed in other ways.
_PATIENCE_S = 7 * 24 * 3600.0

# chain, first new segment, settings, form of the KV, the rank's own segments
OpenRows = Callable[[Sequence[Segment], int, SparseSettings, KVFormat, Sequence[Segment]], RowsInHalves]


@dataclass(frozen=True)
class RankParts:
    """What a rank computes with. `fingerprint` is equal for all ranks, or their KV would differ."""

    model: Model
    open_rows: OpenRows
    fingerprint: str


OpenRank = Callable[[torch.device], RankParts]  # goes to another process: a function of a module, or a partial of one


def run_rank(
    rank: int, size: int, rendezvous: Path, device: torch.device, pipe: Connection, open_rank: OpenRank, threads: int
) -> None:
    """The process's whole life. It ends with rank 0's process, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: rank 0 decides what becomes of it
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        parts = open_rank(device)
        pipe.send(commands.Ready(parts.fingerprint))
        link = Link(rendezvous, rank, size, device, timeout_s=_PATIENCE_S, check=lambda: None)
        with torch.inference_mode():
            _Follower(pipe, link, parts).run()
    except (EOFError, BrokenPipeError):  # rank 0 has closed the group
        status = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(commands.Failed(_reason(error)))
        status = 1
    # The libraries' own ends wait for the other ranks.
    os._exit(status)


def _reason(error: BaseException) -> str:
    """Its place, and its message where that is ours or torch's: others may quote what was worked on."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = f": {error}" if isinstance(error, (EngineError, RuntimeError)) else ""
    return f"{type(error).__name__}{message} (in {Path(frame.filename).name}:{frame.lineno})"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # wherever the other threads are: they may wait for rank 0


class _Follower:
    def __init__(self, pipe: Connection, link: Link, parts: RankParts) -> None:
        self._pipe, self._link, self._parts = pipe, link, parts
        self._heard: deque[commands.Command] = deque()
        self._shared: SharedRows | None = None

    def run(self) -> None:
        """Raises EOFError at the end of the pipe."""
        while True:
            self._follow(self._heard.popleft() if self._heard else self._pipe.recv())

    def _follow(self, command: commands.Command) -> None:
        if isinstance(command, commands.Open):
            self._open(command)
            return
        shared = self._shared
        if shared is None:  # what could not be opened is not closed either
            return
        match command:
            case commands.Embed(tokens):
                for _ in shared.rows.embed(tokens):
                    pass
            case commands.Load():
                shared.load(self._stored, None)
            case commands.Layer(index):
                self._layer(shared, index)
            case commands.Collect():
                shared.collect(None)
            case commands.Spread():
                shared.spread(None)
            case commands.Report():
                shared.rows.settle()
                self._pipe.send(commands.Reported(shared.rows.report.to_json()))
                shared.rows.report = AttentionReport()
            case commands.Close():
                self._shared = None
                shared.rows.close()

    def _open(self, command: commands.Open) -> None:
        model, link = self._parts.model, self._link
        rounds = deal(command.chain[command.first :], link.size)
        own = [segment for turn in rounds for segment in turn[link.rank]]
        self._stored = command.chain[: command.first]
        try:
            rows = self._parts.open_rows(command.chain, command.first, command.settings, command.kv, own)
        except OutOfMemory as error:
            self._pipe.send(commands.NoMemory(error.needed_bytes, error.available_bytes))
            return
        self._shared = SharedRows(rows, rounds, link, command.kv.layout(model.spec), model)
        self._pipe.send(commands.Opened())

    def _layer(self, shared: SharedRows, index: int) -> None:
        for _ in shared.layer(index, None):
            if self._withdrawn():
                shared.leave_layer()
                return

    def _withdrawn(self) -> bool:
        """Whether rank 0 has closed the prefill under way."""
        while self._pipe.poll():
            self._heard.append(self._pipe.recv())
        return any(isinstance(command, commands.Close) for command in self._heard)
