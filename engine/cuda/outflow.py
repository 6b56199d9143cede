"""KV on its way from the device to the store, beside the computing: a stream and threads of its own."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.cuda.memory import new_event, new_stream

# In flight: enough for the runs that are queued on the device, so that sending seldom waits.
_BUFFER_BYTES, _MOST_BUFFERS = 640 << 20, 48
# One copies 2 to 4 GB/s into the store's memory; a prefill makes up to 6.
_LANES = 4


@dataclass(frozen=True)
class _Piece:
    pinned: torch.Tensor  # [bytes] uint8
    size: int
    arrived: torch.cuda.Event
    keep: Callable[[memoryview], None]


class Outflow:
    """Hands packed KV to the store, each lane's in the order it was sent. One thread sends."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        """`piece_bytes`: the most that one piece has."""
        self._stream = new_stream(device)
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._sent: list[queue.SimpleQueue[_Piece | None]] = [queue.SimpleQueue() for _ in range(_LANES)]
        self._error: BaseException | None = None
        self._waiting = 0
        self._changed = threading.Condition()
        for _ in range(max(2, min(_MOST_BUFFERS, _BUFFER_BYTES // piece_bytes))):
            self._free.put(torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=True))
        self._threads = [
            threading.Thread(target=self._run, args=(sent,), name=f"kv-outflow-{lane}", daemon=True)
            for lane, sent in enumerate(self._sent)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, packed: torch.Tensor, keep: Callable[[memoryview], None], *, lane: int) -> None:
        """packed [bytes] uint8 on the device goes to `keep`, which copies it. Blocks while all buffers are in flight.

        Raises what an earlier `keep` raised.
        """
        self._check()
        pinned, size = self._free.get(), packed.numel()
        self._stream.wait_stream(torch.cuda.current_stream(packed.device))
        with torch.cuda.stream(self._stream):
            pinned[:size].copy_(packed, non_blocking=True)
            packed.record_stream(self._stream)
            arrived = new_event()
            arrived.record()
        with self._changed:
            self._waiting += 1
        self._sent[lane % _LANES].put(_Piece(pinned, size, arrived, keep))

    def settle(self) -> None:
        """Wait until everything sent was kept. Raises what `keep` raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting == 0)
        self._check()

    def close(self) -> None:
        """Wait for what is in flight, keep no more of it, end the threads."""
        self._error = self._error or RuntimeError("the outflow is closed")
        for sent in self._sent:
            sent.put(None)
        for thread in self._threads:
            thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, sent: "queue.SimpleQueue[_Piece | None]") -> None:
        while (piece := sent.get()) is not None:
            try:
                piece.arrived.synchronize()
                if self._error is None:
                    piece.keep(piece.pinned[: piece.size].numpy().data)
            except BaseException as error:  # the sender must hear of it, whatever it is
                self._error = error
            self._free.put(piece.pinned)
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()
