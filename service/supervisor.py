"""Keeps one worker process running: starts it again when it dies, later each time, and stops it gently."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from service.settings import Settings

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 30.0
EXIT_UNUSABLE = 2  # of a worker that can't use the model or these settings: another would fare no better
STEADY_S = 60.0  # a worker that lived so long has earned a quick restart


def worker_command(module: str = "service.worker") -> list[str]:
    return [sys.executable, "-m", module, "--parent", str(os.getpid())]


def environment(settings: Settings) -> dict[str, str]:
    """This process's environment, with `settings` in it, for a child that reads them there."""
    values = {
        f"FOREWORD_{name.upper()}": str(value) for name, value in settings.model_dump().items() if value is not None
    }
    return {**os.environ, **values}


class Supervisor:
    """`died(pid)` is called behind every unexpected end; `unusable()` where the first worker ended with EXIT_UNUSABLE,
    and then none is started again. Later ones are: what they can't use was usable before.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        died: Callable[[int], None] = lambda pid: None,
        unusable: Callable[[], None] = lambda: None,
    ) -> None:
        self._command = list(command)
        self._env = dict(env)
        self._died = died
        self._unusable = unusable
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel tells a child that its parent died when the parent's *thread* ends: this one lives till the end.
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the worker, while one runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def close(self, *, timeout_s: float = 30.0) -> None:
        """SIGTERM, so that it suspends its work; SIGKILL if that takes longer than `timeout_s`."""
        self._stop.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
        self._thread.join(timeout_s)
        if self._thread.is_alive() and (process := self._process) is not None:
            log.warning("worker %d did not end within %.0f s: killed", process.pid, timeout_s)
            process.kill()
            self._thread.join()

    def _run(self) -> None:
        delay_s, first = FIRST_DELAY_S, True
        while not self._stop.is_set():
            started = time.monotonic()
            self._process = process = subprocess.Popen(self._command, env=self._env, stdin=subprocess.DEVNULL)
            if self._stop.is_set():  # `close` may have looked just before
                process.terminate()
            status = process.wait()
            if self._stop.is_set():
                return
            self._died(process.pid)
            if first and status == EXIT_UNUSABLE:
                self._unusable()
                return
            first = False
            delay_s = FIRST_DELAY_S if time.monotonic() - started > STEADY_S else min(2 * delay_s, LONGEST_DELAY_S)
            log.error("worker %d ended with status %d: another starts in %.1f s", process.pid, status, delay_s)
            self._stop.wait(delay_s)
