"""A thread that does one thing again and again."""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Timer:
    """Calls `action` every `interval_s` from a thread, whatever it raises."""

    def __init__(self, name: str, interval_s: float, action: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._action = action
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._action()
            except Exception:
                log.exception("%s failed; it is tried again", self._thread.name)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
