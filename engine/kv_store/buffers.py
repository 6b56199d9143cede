"""Buffers for layers read from disk, used again once nobody looks at them."""

import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def plain_memory(size_bytes: int) -> Bytes:
    """`size_bytes` of ordinary memory, [size_bytes] uint8."""
    return np.empty(size_bytes, np.uint8)


class BufferPool:
    """Hands out writable byte arrays; the memory of one comes back when its last view is gone.

    Fresh memory costs a page fault every 4 KiB, more than reading from the page cache does. Where the idle memory is
    full, a buffer pushes out smaller ones: the ends of documents, each of its own size, must not fill it. Memory that
    somebody will use again soon (`expect`) may lie idle beyond the limit. `allocate` may give other memory, such as
    pinned memory.
    """

    def __init__(self, max_idle_bytes: int, allocate: Callable[[int], Bytes] = plain_memory) -> None:
        self._max_idle_bytes, self._allocate = max_idle_bytes, allocate
        self._idle: dict[int, deque[Bytes]] = {}
        self._idle_bytes = 0

    def take(self, size_bytes: int) -> Bytes:
        """An array of `size_bytes` with undefined contents."""
        idle = self._idle.setdefault(size_bytes, deque())
        try:
            memory = idle.pop()
            self._idle_bytes -= size_bytes
        except IndexError:
            memory = self._allocate(size_bytes)
        # Views of `view` keep `view` alive, not `memory`: numpy would otherwise collapse the chain to its base.
        view = np.frombuffer(memory, np.uint8)
        weakref.finalize(view, self._give_back, memory).atexit = False
        return view

    def take_aligned(self, size_bytes: int, alignment: int) -> memoryview:
        """`size_bytes` at an address that `alignment` divides, as O_DIRECT wants it."""
        memory = self.take(size_bytes + alignment)
        first = -memory.ctypes.data % alignment
        return memory.data[first : first + size_bytes]  # a slice of the array would not keep it alive, see `take`

    def expect(self, size_bytes: int) -> None:
        """So much more may lie idle, until the same number is given back as a negative one."""
        self._max_idle_bytes += size_bytes
        while self._idle_bytes > self._max_idle_bytes:
            idle = next((idle for idle in list(self._idle.values()) if idle), None)
            if idle is None:
                return
            try:
                self._idle_bytes -= idle.popleft().nbytes
            except IndexError:  # another thread took it
                continue

    def fill(self, size_bytes: int, count: int) -> None:
        """Have `count` buffers of `size_bytes` ready whose pages are there: taking them costs no page fault.

        Raises ValueError where they are more than may lie idle.
        """
        if size_bytes * count > self._max_idle_bytes:
            raise ValueError(f"got {count} buffers of {size_bytes} bytes, expected {self._max_idle_bytes} at most")
        for _ in range(count):
            memory = self._allocate(size_bytes)
            memory.fill(0)
            self._give_back(memory)

    def _give_back(self, memory: Bytes) -> None:
        # Runs inside the garbage collector, in any thread: no locks here. The count may drift by a race of two
        # threads, which costs a buffer more or less, nothing else.
        if memory.nbytes > self._max_idle_bytes:
            return
        while self._idle_bytes + memory.nbytes > self._max_idle_bytes:
            smaller = next((idle for size, idle in list(self._idle.items()) if size < memory.nbytes and idle), None)
            if smaller is None:
                return
            try:
                dropped = smaller.popleft()
            except IndexError:  # another thread took it
                continue
            self._idle_bytes -= dropped.nbytes
        self._idle_bytes += memory.nbytes
        self._idle.setdefault(memory.nbytes, deque()).append(memory)
