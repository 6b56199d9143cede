"""What keeps processes in order: locks, leases, presence, supervisor, timers, secrets, logs, shared metrics."""

import io
import json
import logging
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from service.leases import LeaseKeeper
from service.locks import AlreadyLocked, PidLock
from service.logs import JsonFormatter, configure_logging, log_fields
from service.presence import SEEN_S, Presence, Workers
from service.queue.base import Job, NewJob
from service.salt import load_secret, tenant_salt
from service.settings import Settings
from service.supervisor import EXIT_UNUSABLE, Supervisor, environment
from service.timer import Timer
from tests.service.bench import Bench, until
from tests.service.fake_engine import FakeEngine, FakeKV

ROOT = Path(__file__).parents[2]


def test_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "foreword.lock"
    with PidLock(path), pytest.raises(AlreadyLocked, match=f"held by process {os.getpid()}"):
        PidLock(path)
    PidLock(path).close()
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys,time;from service.locks import PidLock;from pathlib import Path\n"
         "lock=PidLock(Path(sys.argv[1]));print('locked',flush=True);time.sleep(60)", str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    with pytest.raises(AlreadyLocked, match=f"held by process {holder.pid}"):
        PidLock(path)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    PidLock(path).close()


# --- leases ----------------------------------------------------------------------------------------------------


def claim(bench: Bench, lease_s: float) -> Job:
    bench.queue.put(NewJob("answer", "t", {}))
    job = bench.queue.claim("w", ["answer"], lease_s=lease_s)
    assert job is not None
    return job


def test_lease_outlives_a_busy_main_thread(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    keeper = LeaseKeeper(bench.queue, lease_s=0.6)
    job = claim(bench, 0.6)
    keeper.hold(job)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:  # never sleeps, never lets go of the interpreter by itself
        sum(range(10_000))
    assert bench.queue.reclaim() == 0
    assert keeper.holds(job)
    keeper.close()
    bench.close()


def test_lost_lease_is_noticed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    keeper = LeaseKeeper(bench.queue, lease_s=60)
    job, other = claim(bench, 60), claim(bench, 60)
    assert not keeper.holds(job), "not held yet"
    keeper.hold(job)
    keeper.hold(other)
    bench.queue.cancel(job.id)
    until(lambda: not keeper.holds(job), 5)
    assert keeper.holds(other)
    keeper.drop(other)
    assert not keeper.holds(other)
    keeper.close()
    bench.close()


def test_worker_that_hangs_is_ended(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    stalled = threading.Event()
    keeper = LeaseKeeper(bench.queue, lease_s=0.2, stall_s=0.5, on_stall=stalled.set)
    job = claim(bench, 60)
    keeper.hold(job)
    for _ in range(8):
        time.sleep(0.1)
        assert keeper.holds(job)
    assert not stalled.is_set()
    assert stalled.wait(10)
    keeper.close()
    bench.close()


# --- presence --------------------------------------------------------------------------------------------------


def test_presence_of_a_worker(tmp_path: Path) -> None:
    engine = FakeEngine(FakeKV(tmp_path / "kv"), lambda ids: "", tmp_path / "resume")
    now = time.time()
    workers = Workers(tmp_path, clock=lambda: now)
    assert not workers.seen()
    assert workers.digest("default") is None
    presence = Presence(tmp_path, engine)
    assert not workers.seen()
    presence.beat()
    assert workers.seen()
    assert workers.digest("strict") == "digest-strict"
    assert workers.digest("unheard of") is None
    now += SEEN_S + 5
    assert not workers.seen()
    presence.beat()  # its file was swept as a dead worker's
    now = time.time()
    assert workers.seen()
    presence.close()
    assert not workers.seen()


# --- supervisor ------------------------------------------------------------------------------------------------


def test_supervisor_restarts_and_reports(tmp_path: Path) -> None:
    died: list[int] = []
    runs = tmp_path / "runs"
    script = f"open({str(runs)!r},'a').write('x')"
    supervisor = Supervisor([sys.executable, "-c", script], dict(os.environ), died=died.append)
    supervisor.start()
    until(lambda: len(died) >= 2)
    supervisor.close()
    assert len(set(died)) == len(died)
    assert len(runs.read_text()) >= 2
    assert supervisor.pid is None


def test_supervisor_gives_up_when_the_first_worker_finds_its_settings_unusable(tmp_path: Path) -> None:
    runs, given_up = tmp_path / "runs", threading.Event()
    script = f"open({str(runs)!r},'a').write('x'); raise SystemExit({EXIT_UNUSABLE})"
    supervisor = Supervisor([sys.executable, "-c", script], dict(os.environ), unusable=given_up.set)
    supervisor.start()
    assert given_up.wait(20)
    supervisor._thread.join(20)
    supervisor.close()
    assert runs.read_text() == "x"


def test_supervisor_kills_what_does_not_end(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(ready)!r}, 'w').close(); time.sleep(60)"
    )
    supervisor = Supervisor([sys.executable, "-c", script], dict(os.environ))
    supervisor.start()
    until(ready.exists)
    start = time.monotonic()
    supervisor.close(timeout_s=0.5)
    assert time.monotonic() - start < 10
    assert supervisor.pid is None


def test_environment_carries_every_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, lease_s=3.5, insecure=True, port=0, api_keys_file=None)
    for name, value in environment(settings).items():
        if name.startswith("FOREWORD_"):
            monkeypatch.setenv(name, value)
    assert Settings() == settings


def test_timer_goes_on_after_an_error() -> None:
    calls: list[int] = []

    def act() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("away")

    timer = Timer("test", 0.01, act)
    until(lambda: len(calls) >= 3)
    timer.close()
    count = len(calls)
    time.sleep(0.05)
    assert len(calls) == count


# --- secret and logs -------------------------------------------------------------------------------------------


def test_secret_is_private_and_lasting(tmp_path: Path) -> None:
    secret = load_secret(tmp_path / "data")
    path = tmp_path / "data" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_secret(tmp_path / "data") == secret
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]
    salts = {tenant_salt(secret, "a"), tenant_salt(secret, "b"), tenant_salt(b"x" * 32, "a")}
    assert len(salts) == 3
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="has 5 bytes, expected 32"):
        load_secret(tmp_path / "data")


def test_log_lines_are_json_with_their_fields() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    with log_fields(job_id="job-1", request_id=None):
        with log_fields(stage="ingest"):
            logger.info("took %d\nlines", 2, extra={"tokens": 7})
        try:
            raise KeyError("x")
        except KeyError:
            logger.exception("failed")
    logger.warning("outside")
    first, second, third = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["message"], first["job_id"], first["stage"], first["tokens"]) == (
        "took 2\nlines",
        "job-1",
        "ingest",
        7,
    )
    assert "request_id" not in first
    assert "stage" not in second
    assert "KeyError" in second["exception"]
    assert (third["level"], "job_id" in third) == ("warning", False)
    with pytest.raises(ValueError, match="log level is 'loud'"):
        configure_logging("loud")


# --- metrics of several processes ------------------------------------------------------------------------------

_COUNT = """
import os, signal
from service.metrics import Metrics
metrics = Metrics()
metrics.generated_tokens.inc(5)
metrics.time_to_first_token.labels("m", "cold").observe(2.0)
metrics.kernel_path.labels("rope", "cpu").set(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
_SCRAPE = """
from service.metrics import Metrics
metrics = Metrics()
metrics.generated_tokens.inc(1)
print(metrics.render().decode())
"""


def test_counts_of_killed_processes_add_up(tmp_path: Path) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", _COUNT], env=env, cwd=ROOT)
        assert process.wait(60) == -9
    text = subprocess.run(
        [sys.executable, "-c", _SCRAPE], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "foreword_generated_tokens_total 11.0" in text
    assert 'foreword_time_to_first_token_seconds_count{cache_state="cold",model="m"} 2.0' in text
    assert 'foreword_kernel_path{op="rope"' not in text, "a dead process takes no path"
