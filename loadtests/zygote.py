"""Processes that start in milliseconds: one has loaded everything that API and worker need, and forks them.

Each is the real thing from there on: `service.serve.serve` or `service.worker.main` in a process of its own, with its
own settings, log and connections. What a worker claims and commits goes to a trace, a line an event, before and after
the command that does it: so it is known afterwards what a kill has hit.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from service import cluster
from service.queue.base import NO_EFFECTS, Effects, Job, JobKind, Json, LeaseLost
from service.queue.redis_queue import RedisQueue
from service.worker import die_with_parent

TRACE, LINGER_S, ENGINE = "CHAOS_TRACE", "CHAOS_LINGER_S", "CHAOS_ENGINE"


class TracedQueue(RedisQueue):
    """Writes `<monotonic seconds> <process> <event> <kind> <job> <attempt>`; appending a short line is never torn."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._trace_file = os.open(os.environ[TRACE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._linger_s = float(os.environ[LINGER_S])

    def _trace(self, event: str, job: Job) -> None:
        line = f"{time.monotonic():.6f} {os.getpid()} {event} {job.kind} {job.id} {job.attempts}\n"
        os.write(self._trace_file, line.encode())

    def _linger(self) -> None:
        """A commit takes a millisecond: longer, so that kills hit it."""
        time.sleep(random.random() * self._linger_s)

    def claim(self, worker: str, kinds: Iterable[JobKind], *, lease_s: float, **which: Any) -> Job | None:
        job = super().claim(worker, kinds, lease_s=lease_s, **which)
        if job is not None:
            self._trace("claimed", job)
        return job

    def finish(self, job: Job, result: Json, effects: Effects = NO_EFFECTS) -> None:
        self._trace("committing", job)
        self._linger()
        try:
            super().finish(job, result, effects)
        except LeaseLost:
            self._trace("refused", job)
            raise
        self._trace("committed", job)
        self._linger()
        self._trace("left", job)

    def fail(self, job: Job, error: Json, *, retry: bool, effects: Effects = NO_EFFECTS) -> Job:
        ended = super().fail(job, error, retry=retry, effects=effects)
        self._trace("left", job)
        return ended

    def holds(self, job: Job) -> bool:
        held = super().holds(job)
        if not held:
            self._trace("left", job)
        return held


def become(parent: int, kind: str, environment: Mapping[str, str], log: str) -> int:
    """Never returns to the zygote's loop."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    sys.argv = [kind]
    random.seed(os.getpid())
    if kind == "api":
        from service.serve import serve
        from service.settings import Settings

        serve(Settings())
        return 0
    from service.worker import main as worker

    if os.environ[ENGINE] == "fake":
        from tests.service.fake_engine import open_fake_parts

        return worker(open_fake_parts)
    return worker()


def main() -> None:
    """Each line of standard input is {"kind", "environment", "log"}; answered with a process id."""
    import uvicorn  # noqa: F401

    from service import app, serve, worker  # noqa: F401

    if os.environ[ENGINE] == "fake":
        from tests.service import fake_engine  # noqa: F401
    else:
        from engine import engine  # noqa: F401
    cluster.RedisQueue = TracedQueue  # type: ignore[misc]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are nobody's business
    print("ready", flush=True)
    for line in sys.stdin:
        order, parent = json.loads(line), os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = become(parent, order["kind"], order["environment"], order["log"])
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
