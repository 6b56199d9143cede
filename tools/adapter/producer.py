"""Worker processes that build training windows ahead of the GPU."""

import multiprocessing
import queue
import random
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from loadtests.fidelity.filler import Filler
from tools.adapter.prompts import Codec
from tools.adapter.windows import Window, make_window

_WAIT_S = 120.0


class WindowProducer:
    """Queues of windows, one a document length; start it before CUDA is initialised, since it forks."""

    def __init__(
        self, codec: Codec, filler: Filler, lengths: Sequence[int], question_rows: int, workers: int, seed: int
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._queues = {length: context.Queue(maxsize=8) for length in lengths}
        self._processes = []
        for i in range(max(workers, len(lengths))):
            length = lengths[i % len(lengths)]
            arguments = (self._queues[length], codec, filler, length, question_rows, f"{seed}/{i}")
            self._processes.append(context.Process(target=_produce, args=arguments, daemon=True))

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()

    def next(self, length: int) -> Window:
        """The next window of `length` document rows; `RuntimeError` if none comes in two minutes."""
        try:
            return self._queues[length].get(timeout=_WAIT_S)
        except queue.Empty:
            raise RuntimeError(f"no window of {length} rows was built in {_WAIT_S:.0f} s") from None


def _produce(
    out: "multiprocessing.Queue[Window]", codec: Codec, filler: Filler, length: int, question_rows: int, seed: str
) -> None:
    rng = random.Random(seed)
    while True:
        out.put(make_window(rng, codec, filler, document_rows=length, question_rows=question_rows))
