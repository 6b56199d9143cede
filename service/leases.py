"""Keeps a worker's leases alive from a thread of its own, so that no long step of engine or parser can starve it."""

import logging
import os
import threading
import time
from collections.abc import Callable

from service.queue.base import Job, LeaseLost, Queue, QueueUnavailable

log = logging.getLogger(__name__)

LOOK_S = 0.05  # the queue is asked no more often than this whether a job is still ours
STALL_S = 900.0


class LeaseKeeper:
    """Renews what is held. `holds` tells within one step that a job was lost or cancelled."""

    def __init__(
        self,
        queue: Queue,
        *,
        lease_s: float,
        stall_s: float = STALL_S,
        on_stall: Callable[[], None] = lambda: os._exit(70),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A job whose holder hasn't called `holds` for `stall_s` hangs: `on_stall` ends the process for its sake."""
        self._queue = queue
        self._lease_s = lease_s
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, Job] = {}
        self._looked_at: dict[str, float] = {}
        self._renewed_at: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def hold(self, job: Job) -> None:
        with self._lock:
            self._held[job.id] = job
            self._looked_at[job.id] = self._renewed_at[job.id] = self._clock()

    def drop(self, job: Job) -> None:
        """The job ended or was lost: renew it no more."""
        with self._lock:
            if self._held.get(job.id) == job:
                del self._held[job.id], self._looked_at[job.id], self._renewed_at[job.id]

    def holds(self, job: Job) -> bool:
        now = self._clock()
        with self._lock:
            if self._held.get(job.id) != job:
                return False
            if now - self._looked_at[job.id] < LOOK_S:
                return True
            self._looked_at[job.id] = now
            leased = now - self._renewed_at[job.id] < self._lease_s
        try:
            return self._queue.holds(job)
        except QueueUnavailable:
            if leased:  # as far as we know nobody may take it from us: work goes on while the store is away
                return True
            raise

    def _run(self) -> None:
        while not self._stop.wait(self._lease_s / 4):
            with self._lock:
                held = list(self._held.values())
                stalled = [job_id for job_id, at in self._looked_at.items() if self._clock() - at > self._stall_s]
            if stalled:
                log.critical("no step for %.0f s in %s: this worker ends", self._stall_s, ", ".join(stalled))
                self._on_stall()
            for job in held:
                self._extend(job)

    def _extend(self, job: Job) -> None:
        began = self._clock()
        try:
            self._queue.extend(job, lease_s=self._lease_s)
            with self._lock:
                if job.id in self._held:
                    self._renewed_at[job.id] = began
        except LeaseLost as error:
            log.info("lease lost: %s", error)
            self.drop(job)
        except QueueUnavailable as error:  # it may be back before the lease ends
            log.warning("lease of %s not renewed: %s", job.id, error)
        except Exception:
            log.exception("lease of %s not renewed", job.id)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
