"""`foreword worker`: claims jobs, runs the engine, finishes. A process of its own: killing it loses no job.

Main thread: the engine's steps (service.scheduler). Beside it a thread each for leases, ingests and chores.
"""

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from engine.errors import ModelError
from engine.threads import share_cores
from service.admission import Admission, free_memory
from service.auth import AuthError, KeyRing
from service.backend import FleetDiffers, SharedDirMissing, open_worker_backend
from service.engine_parts import EngineParts, open_engine_parts
from service.housekeeping import TICK_S, Housekeeper
from service.ingest import ingest
from service.leases import STALL_S, LeaseKeeper
from service.logs import configure_logging, log_uncaught
from service.metrics import Metrics
from service.metrics_gpu import gpu_reporter
from service.metrics_port import WorkerPage, show_metrics
from service.queue.base import QueueUnavailable
from service.scheduler import EngineBroken, Scheduler
from service.settings import Settings
from service.stages.context import StageContext
from service.stages.ingest import IngestLoop
from service.supervisor import EXIT_UNUSABLE
from service.timer import Timer
from service.traces import open_traces

log = logging.getLogger(__name__)

EXIT_BROKEN = 70  # the engine can't go on in this process
_PR_SET_PDEATHSIG = 1


def run_worker(settings: Settings, open_parts: Callable[[Settings, Metrics], EngineParts] = open_engine_parts) -> int:
    """Work until SIGTERM or SIGINT; then suspend prefills, hand back leases and return the exit status.

    Raises ModelError, ValueError, and what opening the backend raises.
    """
    settings = settings.resolved()
    name = f"{os.uname().nodename}-{os.getpid()}"
    with ExitStack() as stack:
        metrics = Metrics(_tenants(settings))
        page = WorkerPage(metrics, settings)
        if settings.metrics_port:
            stack.callback(show_metrics(page.text, settings.host, settings.metrics_port))
        parts = open_parts(settings, metrics)
        stack.callback(parts.close)
        page.opened(parts.kv_report.usage, parts.model.id)
        stack.callback(page.closed)
        backend = open_worker_backend(settings, name, parts.engine, parts.model, parts.kv_report, stack)
        traces = open_traces(settings.otlp_endpoint, process="worker", model=parts.model.id)
        stack.callback(traces.close)
        leases = LeaseKeeper(
            backend.queue, lease_s=settings.lease_s, stall_s=max(STALL_S, 2 * settings.ingest_timeout_s)
        )
        stack.callback(leases.close)
        context = StageContext(
            settings=settings,
            queue=backend.queue,
            documents=backend.documents,
            engine=parts.engine,
            kv=parts.kv,
            prompts=parts.model.prompts,
            model_id=parts.model.id,
            leases=leases,
            metrics=metrics,
            secret=backend.secret,
            clock=time.time,
            device=parts.device,
            traces=traces,
            admission=Admission(parts.prefill_bytes, lambda: free_memory(parts.device)),
        )
        report_gpus = gpu_reporter(metrics)
        stack.callback(metrics.flush)
        housekeeper = Housekeeper(context, backend.documents, parts.kv, parts.resume)
        try:
            housekeeper.sweep_orphans()
        except QueueUnavailable as error:
            log.warning("what earlier workers left is not swept: %s", error)

        def beat() -> None:
            try:
                backend.life.beat()
            except FleetDiffers as error:  # it was away for so long that others began with another model
                log.critical("%s", error)
                scheduler.stop()

        def chores() -> None:
            parts.report()
            report_gpus()
            metrics.flush()
            try:
                beat()
                housekeeper.tick()
            except QueueUnavailable as error:
                log.warning("chores wait: %s", error)

        scheduler = Scheduler(context, name)
        ingests = IngestLoop(
            context,
            name,
            ingest,
            tokenizer_file=parts.tokenizer_file,
            paused=scheduler.alone,
            busy=scheduler.ingesting,
        )
        with _stopped_by_signals(scheduler):
            with contextlib.suppress(QueueUnavailable):  # the next beat comes in a second
                beat()
            metrics.serving(parts.model.id, parts.device)
            stack.callback(Timer("housekeeping", TICK_S, chores).close)
            ingests.start()
            stack.callback(ingests.close)
            log.info("worker %s is ready: %s", name, parts.model.id)
            try:
                scheduler.run()
            except EngineBroken as error:
                log.critical("the engine can't go on in this process: %s", error)
                return EXIT_BROKEN
        log.info("worker %s ends", name)
    return 0


def _tenants(settings: Settings) -> Sequence[str]:
    """Those that have series by name. Without the keys file, which only the API needs, all are counted as one."""
    try:
        return KeyRing.load(settings.api_keys_file).tenants
    except AuthError as error:
        log.warning("tenants are not told apart in the metrics: %s", error)
        return ()


@contextmanager
def _stopped_by_signals(scheduler: Scheduler) -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        scheduler.stop()

    numbers = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Unusable(Exception):
    """The engine can't be opened with this model and these settings."""


def die_with_parent(parent: int) -> None:
    """Get SIGTERM when the process `parent` dies; end now where it is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(f"the server process {parent} is gone")


def main(open_parts: Callable[[Settings, Metrics], EngineParts] = open_engine_parts) -> int:
    """What `service.serve` starts: settings from the environment."""
    parser = argparse.ArgumentParser(prog="foreword worker")
    parser.add_argument("--parent", type=int, help="end when this process ends")
    arguments = parser.parse_args()
    share_cores()
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both: the server decides what becomes of us
    settings = Settings()
    configure_logging(settings.log_level)
    log_uncaught()

    def open_or_refuse(settings: Settings, metrics: Metrics) -> EngineParts:
        try:
            return open_parts(settings, metrics)
        except (ModelError, ValueError) as error:
            raise Unusable(str(error)) from error

    try:
        return run_worker(settings, open_or_refuse)
    except (Unusable, FleetDiffers, SharedDirMissing) as error:
        log.error("%s", error)
        return EXIT_UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
