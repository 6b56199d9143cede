"""A group of ranks as rank 0 has it: the processes of the others, what they are told, and their deaths."""

import contextlib
import logging
import multiprocessing
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from engine.chain import Segment
from engine.errors import EngineError, RankLost
from engine.kv_format import KVFormat
from engine.parallel import commands
from engine.parallel.leading import LeadingRows
from engine.parallel.link import Link
from engine.parallel.process import OpenRank, RankParts, run_rank
from engine.sparse.settings import SparseSettings

log = logging.getLogger(__name__)

_STARTING_S = 1800.0  # weights of a large model from a slow disk
_STALL_S = 600.0  # a rank that keeps the others waiting for so long is taken for dead
_ENDING_S = 5.0


class RankGroup:
    """Processes for ranks 1 and up; rank 0 is the caller's own, which can be in one group at a time. One prefill at a
    time has them.

    A rank that dies or keeps silent ends the group: whatever runs raises RankLost, and so does every later prefill.
    """

    def __init__(self, size: int, open_rank: OpenRank, device: torch.device) -> None:
        """Start `size` - 1 processes that open their model with `open_rank` while this one opens its own.

        Raises ValueError where there are fewer GPUs.
        """
        devices = rank_devices(size, device)
        self.size, self._device = size, devices[0]
        self._folder = tempfile.TemporaryDirectory(prefix="foreword-ranks-")
        self._rendezvous = Path(self._folder.name) / "rendezvous"
        self._link: Link | None = None
        self._busy = self._closed = False
        self._reading = threading.Lock()
        self._reasons: dict[int, str] = {}  # of ranks that said why they end
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for rank in range(1, size):
            here, there = context.Pipe()
            process = context.Process(
                target=run_rank,
                args=(rank, size, self._rendezvous, devices[rank], there, open_rank, torch.get_num_threads()),
                name=f"rank-{rank}",
                daemon=True,
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._watch = threading.Thread(target=self._watch_ranks, name="rank-watch", daemon=True)

    def join(self, parts: RankParts) -> None:
        """Wait until all ranks are ready, and meet them. Raises RankLost, EngineError where one computes otherwise."""
        self._parts = parts
        for rank in range(1, self.size):
            answer = self._hear(rank, timeout_s=_STARTING_S)
            if not isinstance(answer, commands.Ready) or answer.fingerprint != parts.fingerprint:
                raise EngineError(f"rank {rank} computes otherwise: got {answer}, expected {parts.fingerprint}")
        self._link = Link(self._rendezvous, 0, self.size, self._device, timeout_s=_STALL_S, check=self.check)
        self._watch.start()
        log.info("%d ranks are ready", self.size)

    @property
    def pids(self) -> list[int]:
        """Of ranks 1 and up."""
        return [process.pid for process in self._processes if process.pid is not None]

    def takes(self, num_segments: int) -> bool:
        """Whether a prefill of so many new segments is for the group, now: each rank has something to do.

        What isn't is for rank 0 alone, and has the same KV.
        """
        return not self._busy and num_segments >= self.size

    def open_rows(self, chain: Sequence[Segment], first: int, settings: SparseSettings, kv: KVFormat) -> LeadingRows:
        """Rows of `chain[first:]` on all ranks. Raises RankLost, OutOfMemory."""
        assert self._link is not None
        assert not self._busy
        self._busy = True
        try:
            return LeadingRows(self, self._link, self._parts, chain, first, settings, kv)
        except BaseException:
            self._busy = False
            raise

    def give_back(self) -> None:
        """The prefill that had the group is over."""
        self._busy = False

    def check(self) -> None:
        """Raises RankLost where a rank is gone; from any thread. Right before anything can come of its death."""
        if not self._closed and wait([process.sentinel for process in self._processes], timeout=0):
            raise self._loss()

    def tell(self, command: commands.Command) -> None:
        self.check()
        for pipe in self._pipes:
            try:
                pipe.send(command)
            except OSError:
                self._wait_for_loss()

    def answers(self) -> list[commands.Answer]:
        """One of each rank, from rank 1 on."""
        return [self._hear(rank, timeout_s=_STALL_S) for rank in range(1, self.size)]

    def close(self) -> None:
        """End all processes; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for pipe in self._pipes:
            pipe.close()  # its end is what a rank that waits for a command ends by
        for process in self._processes:
            process.join(_ENDING_S)
            if process.is_alive():
                process.kill()
                process.join()
        if self._link is not None:
            self._link.close()
        self._folder.cleanup()

    def _hear(self, rank: int, *, timeout_s: float) -> commands.Answer:
        pipe = self._pipes[rank - 1]
        if not wait([pipe, self._processes[rank - 1].sentinel], timeout_s):
            raise RankLost(f"rank {rank} of {self.size} has not answered for {timeout_s:.0f} s")
        with self._reading:
            try:
                answer: commands.Answer = pipe.recv()
            except (EOFError, OSError):
                answer = commands.Failed("")
        if isinstance(answer, commands.Failed):
            self._reasons.setdefault(rank, answer.reason)
            self._processes[rank - 1].join(_ENDING_S)
            raise self._loss()
        return answer

    def _loss(self) -> RankLost:
        """Of the rank that went first: the others have only heard of it."""
        found = {}
        with self._reading:
            for rank, (process, pipe) in enumerate(zip(self._processes, self._pipes, strict=True), 1):
                if not wait([process.sentinel], timeout=0):
                    continue
                process.join(_ENDING_S)  # its pipes end before its status is there
                with contextlib.suppress(EOFError, OSError):
                    while rank not in self._reasons and pipe.poll():
                        if isinstance(answer := pipe.recv(), commands.Failed):
                            self._reasons[rank] = answer.reason
                found[rank] = self._reasons.get(rank) or f"exit status {process.exitcode}"
        first = min(found, key=lambda rank: (found[rank].startswith(RankLost.__name__), rank), default=None)
        return RankLost(f"rank {first} of {self.size} is gone: {found.get(first or 0, 'no answer')}")

    def _wait_for_loss(self) -> None:
        wait([process.sentinel for process in self._processes], timeout=_ENDING_S)
        self.check()
        raise RankLost("a rank hears nothing any more")

    def _watch_ranks(self) -> None:
        """A GPU waits for a dead rank for ever, and so does what waits for the GPU: it is told to stop."""
        wait([process.sentinel for process in self._processes])
        if not self._closed and self._link is not None:
            log.error("a rank has ended")
            self._link.abort()


def rank_devices(size: int, device: torch.device) -> list[torch.device]:
    """One a rank, rank 0's first. Raises ValueError where there are fewer GPUs."""
    if device.type != "cuda":
        return [device] * size
    count = torch.cuda.device_count()
    if size > count:
        raise ValueError(f"gpus: got {size}, but there are {count} CUDA devices")
    first = torch.cuda.current_device() if device.index is None else device.index
    return [torch.device("cuda", (first + rank) % count) for rank in range(size)]
