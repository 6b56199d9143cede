"""The chores of a worker, on a timer: reclaim, expiry, garbage, old jobs; and what a crash left, once at the start."""

import logging
import shutil
from pathlib import Path
from typing import Protocol

from service.documents.base import CollectedDocuments, UnknownRecord
from service.documents.garbage import Garbage
from service.kv_policy import KeepsPolicies, apply_kv_policy, delete_handle
from service.metrics import Metrics
from service.queue.base import FINAL_STATES, Queue, UnknownJob
from service.stages.context import StageContext

log = logging.getLogger(__name__)

TICK_S = 1.0
SLOW_TICKS = 5  # chores that needn't be done each second
JOBS_KEPT_S = 24 * 3600.0


class Unfinished(Protocol):
    """What interrupted work left to go on from: of the KV store, and engine.resume.ResumeFolder's points."""

    def unfinished(self) -> set[str]:
        """Jobs that left something and that nobody is at."""
        ...

    def discard(self, owner: str) -> int: ...

    def sweep(self) -> int: ...


class KVChores(KeepsPolicies, Unfinished, Protocol):
    """engine.kv_store.KVCatalog."""

    def release(self, holder: str) -> int: ...


class Housekeeper:
    """`tick` is one round, due every TICK_S."""

    def __init__(
        self,
        context: StageContext,
        documents: CollectedDocuments,
        kv: KVChores,
        resume: Unfinished | None = None,
    ) -> None:
        self._files_dir = context.settings.files_dir
        self._queue = context.queue
        self._documents = documents
        self._kv = kv
        self._unfinished: list[Unfinished] = [kv] if resume is None else [kv, resume]
        self._metrics = context.metrics
        self._clock = context.clock
        self._ticks = 0

    def tick(self) -> None:
        reclaim(self._queue, self._metrics)
        self._ticks += 1
        if self._ticks % SLOW_TICKS == 0:
            self.expire()
            self._documents.collect(self._remove)
            self.forget_unfinished()
            self._queue.prune(self._clock() - JOBS_KEPT_S)

    def expire(self) -> None:
        """Delete the handles whose time is over; with a document's last one the document goes."""
        for file in self._documents.expired_files(self._clock()):
            try:
                delete_handle(self._documents, self._kv, file.tenant, file.id)
            except UnknownRecord:
                continue  # its owner was faster
            log.info("file %s expired", file.id)

    def forget_unfinished(self) -> None:
        """What was left to go on from goes once its job is over: the document may be deleted."""
        for kept in self._unfinished:
            for owner in kept.unfinished():
                if self._is_over(owner):
                    kept.discard(owner)
            kept.sweep()

    def _is_over(self, job_id: str) -> bool:
        try:
            return self._queue.get(job_id).state in FINAL_STATES
        except UnknownJob:  # of the command line, or long gone: it goes by its age
            return False

    def sweep_orphans(self) -> int:
        """Remove folders of ingests that never came to a document. Returns how many."""
        root = self._files_dir / "documents"
        ended = [folder for folder in root.glob("*") if not self._is_running(folder)]
        # Asked last: what another worker has finished meanwhile is named by now.
        named = {Path(folder).parts[1] for folder in self._documents.folders()}
        orphans = [folder for folder in ended if folder.name not in named]
        for folder in orphans:
            shutil.rmtree(folder, ignore_errors=True)
        if orphans:
            log.info("removed %d folders of ingests that never ended", len(orphans))
        return len(orphans)

    def _is_running(self, folder: Path) -> bool:
        job_id, _, epoch = folder.name.rpartition(".")
        try:
            job = self._queue.get(job_id)
        except UnknownJob:
            return False
        return job.state not in FINAL_STATES and str(job.epoch) == epoch

    def _remove(self, piece: Garbage) -> None:
        match piece.kind:
            case "holder":
                self._kv.release(piece.name)
            case "policy":
                document_id, _, fidelity = piece.name.rpartition(":")
                apply_kv_policy(self._documents, self._kv, document_id, fidelity)
            case "upload":
                _remove_tree(self._files_dir / "uploads" / piece.name)
            case "folder":
                _remove_tree((self._files_dir / piece.name).parent)


def reclaim(queue: Queue, metrics: Metrics) -> None:
    """Take back the jobs of silent workers."""
    if (count := queue.reclaim()) > 0:
        metrics.lease_reclaims.inc(count)
        log.warning("%d jobs were taken back: their leases had ended", count)


def _remove_tree(path: Path) -> None:
    """Raises OSError, but not where it is gone already."""
    if path.exists():
        shutil.rmtree(path)
