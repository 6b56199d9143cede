"""What ranks exchange by torch.distributed: over NCCL between GPUs, over gloo between processes on a CPU."""

import contextlib
import datetime
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from engine.errors import RankLost

# Its name before torch 2.13, which warns of it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_POLL_S = 0.0005


@dataclass(frozen=True)
class Gathering:
    """An all-gather under way. `own` and `parts` must not be touched before `Link.finish`."""

    own: torch.Tensor  # [bytes] uint8
    parts: torch.Tensor  # [ranks, bytes] uint8
    work: dist.Work


class Link:
    """One rank's end. Every rank makes the same calls in the same order, with tensors of the same sizes.

    All raise RankLost where another rank doesn't take part.
    """

    def __init__(
        self,
        rendezvous: Path,
        rank: int,
        size: int,
        device: torch.device,
        *,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        """Meet the others at the file `rendezvous`. `check` is called while this rank waits, and raises to end that.

        `timeout_s`: how long this rank waits for the others in one exchange.
        """
        self.rank, self.size, self.device, self._check = rank, size, device, check
        _stay_on_this_host()
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=rendezvous.as_uri(),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )

    def gather(self, own: torch.Tensor) -> Gathering:
        """Begin to hand `own` [bytes] uint8 to all ranks, and to get theirs."""
        parts = torch.empty(self.size, own.numel(), dtype=torch.uint8, device=self.device)
        with self._losses():
            work = _all_gather(parts.view(-1), own, async_op=True)
        assert work is not None
        return Gathering(own, parts, work)

    def finish(self, gathering: Gathering) -> Iterator[None]:
        """Until `parts` can be used: on a GPU by what is queued behind this, elsewhere by anybody."""
        if self.device.type != "cuda":
            while not gathering.work.is_completed():
                time.sleep(_POLL_S)
                self._check()
                yield
        self._wait(gathering.work)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's tensor into everybody's."""
        with self._losses():
            work = dist.broadcast(tensor, 0, async_op=True)
        self._wait(work)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        with self._losses():
            work = dist.isend(tensor, to)
        self._wait(work)

    def receive(self, tensor: torch.Tensor, sender: int) -> None:
        with self._losses():
            work = dist.irecv(tensor, sender)
        self._wait(work)

    def abort(self) -> None:
        """Let no exchange wait any longer, from any thread: what they brought is not to be used."""
        if self.device.type == "cuda" and dist.is_initialized() and dist.group.WORLD is not None:
            dist.group.WORLD.abort()

    def close(self) -> None:
        """Without the others, who may be gone."""
        self.abort()
        with contextlib.suppress(RuntimeError):
            if dist.is_initialized():
                dist.destroy_process_group()

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        self._check()
        with self._losses():
            work.wait()

    @contextlib.contextmanager
    def _losses(self) -> Iterator[None]:
        """torch.distributed's errors as RankLost."""
        try:
            yield
        except RuntimeError as error:
            self._check()  # the other rank's end is the cause, if it is gone
            raise RankLost(f"ranks don't hear each other: {error}") from error


def _stay_on_this_host() -> None:
    """The libraries' only way of being told an interface is the environment."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
