"""Who waits for news of what: threads and tasks, woken by whichever thread hears of it."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Waiters:
    def __init__(self, first: Callable[[], None] = lambda: None) -> None:
        """`first` is called when somebody waits and nobody did before."""
        self._first = first
        self._lock = threading.Lock()
        self._waiters: dict[str, set[Callable[[], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiters)

    @contextmanager
    def watch(self, key: str) -> Iterator[threading.Event]:
        """An event that is set at each news of `key` within the block."""
        event = threading.Event()
        with self._registered(key, event.set):
            yield event

    @contextmanager
    def watch_async(self, key: str) -> Iterator[asyncio.Event]:
        """The same for the running event loop."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(event.set)

        with self._registered(key, wake):
            yield event

    def wake(self, key: str) -> None:
        with self._lock:
            wakes = list(self._waiters.get(key, ()))
        for wake in wakes:
            wake()

    def wake_all(self) -> None:
        with self._lock:
            keys = list(self._waiters)
        for key in keys:
            self.wake(key)

    @contextmanager
    def _registered(self, key: str, wake: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            idle = not self._waiters
            self._waiters.setdefault(key, set()).add(wake)
        if idle:
            self._first()
        try:
            yield
        finally:
            with self._lock:
                group = self._waiters[key]
                group.discard(wake)
                if not group:
                    del self._waiters[key]
