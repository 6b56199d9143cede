"""Kill everything, again and again, and count what was lost or done twice (`make chaos`).

API and worker processes over a real Redis, in part behind a proxy; documents are uploaded and asked about all the
while. At random: kill -9 of a worker (mostly inside a prefill, an ingest or a commit, by its own trace), of an API, of
Redis (which comes back from its append-only file), a network that is cut, a process that is paused for longer than its
lease. In the bulk the engine is fake and fast; processes, queue and commits are real. `--engine real` has the default
model instead. At the end everything that was accepted must have ended, once.

    python -m loadtests.chaos --faults 100 --seed 1      one slice; its counts are kept in results/chaos.json
    python -m loadtests.chaos --combine                  the figures of all slices, into results/summary.json
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from engine.model_folder import resolve_model
from loadtests.chaos_trace import Trace
from loadtests.cluster import ROOT, Client, Member, until
from loadtests.proxy import Proxy
from loadtests.redis_server import RedisServer, free_port
from loadtests.results import write_entry
from service.settings import Settings

SLICES = Path(__file__).with_name("results") / "chaos.json"
COMMAND = "make chaos"
LEASE_S = 2.0
WINDOW_S = 2.0  # so long a fault waits for its victim to be inside something
STALL_S = 0.5
LATE_S = 2.0
WINDOWS = ("prefill", "ingest", "commit")
FAULTS = {"worker": 0.8, "api": 0.06, "redis": 0.05, "network": 0.05, "pause": 0.04}
SETTLE_S = 90.0  # so long everything that was accepted may take to end behind the last fault


class Forked(Member):
    """A member that the zygote forks."""

    def __init__(
        self, zygote: "Zygote", kind: str, name: str, environment: dict[str, str], log: Path, port: int
    ) -> None:
        super().__init__(name, [], environment, log, port)
        self.kind = kind
        self._zygote = zygote
        self._pid = 0

    def start(self) -> "Forked":
        self._pid = self._zygote.fork(self.kind, self._environment, self.log)
        return self

    @property
    def pid(self) -> int:
        return self._pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    @property
    def is_alive(self) -> bool:
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        return True


class Zygote:
    def __init__(self, trace: Path, engine: str, linger_s: float) -> None:
        values = {"CHAOS_TRACE": str(trace), "CHAOS_ENGINE": engine, "CHAOS_LINGER_S": str(linger_s)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadtests.zygote"],
            env={**os.environ, **values},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def fork(self, kind: str, environment: dict[str, str], log: Path) -> int:
        assert self._process.stdin is not None
        order = {"kind": kind, "environment": environment, "log": str(log)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Chaos:
    def __init__(self, folder: Path, *, engine: str, seed: int) -> None:
        self.draw = random.Random(seed)
        self.engine = engine
        self.folder = folder
        self.redis = RedisServer(folder / "redis").start()
        self.proxy = Proxy(self.redis.port)
        self.trace = Trace(folder / "trace")
        self.zygote = Zygote(self.trace.path, engine, 0.03)
        self.client = Client(timeout_s=30)
        real = engine == "real"
        self._model = self._model_name()
        self.apis = [self._member("api", f"api-{number}", behind=number == 0) for number in range(1 if real else 2)]
        places = ("machine-1", "machine-1") if real else ("machine-1", "machine-1", "machine-2", "machine-2")
        self.workers = [
            self._member("worker", f"worker-{number}", place=place, behind=number == 0)
            for number, place in enumerate(places)
        ]
        self.counts: Counter[str] = Counter()
        self.takeovers: list[tuple[str, float, int]] = []  # job, killed at, by whom it was held
        self.troubles: list[tuple[float, float]] = []  # when Redis was away or cut off
        self.accepted: dict[str, float] = {}
        self.answers: Counter[str] = Counter()
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._watch_machine, daemon=True)
        self._watch.start()
        self._number = 0
        self._lock = threading.Lock()

    def _watch_machine(self) -> None:
        """Times when this program, and so the machine, stood still: what is timed then says nothing."""
        while not self._stop.is_set():
            before = time.monotonic()
            time.sleep(0.05)
            if time.monotonic() - before > STALL_S:
                self.troubles.append((before, time.monotonic()))
                self.counts["stalls of the machine"] += 1

    def _member(self, kind: str, name: str, *, behind: bool, place: str | None = None) -> Forked:
        port = free_port()
        redis_port = self.proxy.port if behind else self.redis.port
        settings: dict[str, object] = {
            "data_dir": self.folder / (place or name),
            "shared_dir": self.folder / "shared",
            "redis_url": f"redis://127.0.0.1:{redis_port}/0",
            "model": self._model,
            "port": port,
            "lease_s": LEASE_S,
            "max_attempts": 10_000,  # poison is another test's business
            "checkpoint_s": 0,
            "disk_floor_bytes": 0,
            "threads": 1,
        }
        environment = {f"FOREWORD_{key.upper()}": str(value) for key, value in settings.items()}
        return Forked(self.zygote, kind, name, environment, self.folder / f"{name}.log", port).start()

    def _model_name(self) -> str:
        if self.engine == "real":
            return "default"
        from tests.service.prompt_models import save_folder

        return str(save_folder(self.folder / "model", "chatml"))

    # --- work ---------------------------------------------------------------------------------------------------

    def work(self, at_once: int) -> None:
        """Upload and ask until `stop`."""
        with ThreadPoolExecutor(at_once) as pool:
            for _ in range(at_once):
                pool.submit(self._user)

    def _user(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                self._number += 1
                number = self._number
            try:
                self._one(number)
            except Exception as error:  # a user who gives up says so
                self.counts["user errors"] += 1
                print(f"user: {error!r}", file=sys.stderr, flush=True)

    def _one(self, number: int) -> None:
        word = random.Random(number).choice(("SLOW", "SLOW", "PATIENT"))
        text = f"{word} document {number} of this run. " * 12
        if self.engine == "real":
            from tests.end_to_end.text import library_text

            text = f"# document {number}\n" + library_text(9_000, skip=number % 40)
        key = f"upload-{number}"
        file_id = self._until_answered(lambda api: self.client.upload(api, text, f"{number}.txt", key))
        self.accepted[file_id] = time.monotonic()
        self._until_answered(lambda api: self._processed(api, file_id))
        if number % 2 == 0:
            answer = self._until_answered(lambda api: self.client.ask(api, file_id, "how long?", max_tokens=16))
            text = answer["choices"][0]["message"]["content"]
            right = text.startswith("It is ") if self.engine == "fake" else bool(text)
            self.answers["right" if right else "wrong"] += 1

    def _processed(self, api: Member, file_id: str) -> bool:
        while not self._stop.is_set():
            if self.client.document(api, file_id)["status"] != "uploaded":
                return True
            time.sleep(0.2)
        return False

    def _until_answered(self, request: Callable[[Member], Any]) -> Any:
        """As a client retries: errors of the server, and a server that is gone, but nothing that is its own fault."""
        while True:
            api = random.choice(self.apis)
            try:
                return request(api)
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500 and error.response.status_code not in (409, 429):
                    raise RuntimeError(f"{error.response.status_code}: {error.response.text[:300]}") from error
            except httpx.TransportError:
                pass
            self.counts["retries of users"] += 1
            time.sleep(0.2)

    # --- faults -------------------------------------------------------------------------------------------------

    def faults(self, count: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        kinds, weights = zip(*FAULTS.items(), strict=True)
        for number in range(count):
            if time.monotonic() > deadline:
                return
            kind = "worker" if self.engine == "real" else self.draw.choices(kinds, weights)[0]
            getattr(self, f"_hit_{kind}")()
            if number % 25 == 24:
                print(f"{number + 1} faults, {len(self.accepted)} documents, {dict(self.counts)}", flush=True)

    def _count(self, kind: str, windows: set[str]) -> None:
        self.counts["faults"] += 1
        self.counts[kind] += 1
        for window in windows:
            self.counts[f"inside {window}"] += 1
        self.counts["inside"] += bool(windows & set(WINDOWS))

    def _await_window(self, members: list[Forked], want: str | None = None) -> Forked:
        """One of `members` that is inside something (a commit, if wanted); any of them where nobody is for a while."""
        # A worker with a real model needs seconds before it is inside anything.
        deadline = time.monotonic() + (WINDOW_S if self.engine == "fake" else 20 * WINDOW_S)
        while time.monotonic() < deadline:
            self.trace.update()
            for member in self.draw.sample(members, len(members)):
                windows = set(self.trace.inside(member.pid).values())
                if windows & ({want} if want else set(WINDOWS)):
                    return member
            time.sleep(0.001 if want else 0.005)
        return self.draw.choice(members)

    def _inside(self, member: Forked) -> dict[str, str]:
        self.trace.update()
        return self.trace.inside(member.pid)

    def _hit_worker(self) -> None:
        want = "commit" if self.draw.random() < 0.2 else None
        if want is None:
            time.sleep(self.draw.random() * 0.3)
        if self.engine == "real":  # loading a model takes longer than a lease: somebody must be there to take over
            until(self._all_ready, 120, "the workers are not ready")
        victim = self._await_window(self.workers, want)
        victim.kill()
        killed_at = time.monotonic()
        time.sleep(0.01)  # what it wrote last is there now
        inside = self._inside(victim)
        self._count("worker", set(inside.values()))
        self.takeovers += [(job, killed_at, victim.pid) for job, where in inside.items() if where in WINDOWS]
        self.trace.ended(victim.pid)
        victim.start()

    def _all_ready(self) -> bool:
        living = self.redis.client.zrange("{foreword}:worker_seen", 0, -1)
        return all(f"{os.uname().nodename}-{worker.pid}".encode() in living for worker in self.workers)

    def _hit_api(self) -> None:
        self._await_window(self.workers)
        victim = self.draw.choice(self.apis)
        victim.kill()
        self._count("api", self._anywhere())
        time.sleep(self.draw.random() * 0.5)
        victim.start()

    def _hit_redis(self) -> None:
        self._await_window(self.workers)
        began = time.monotonic()
        self.redis.kill()
        self._count("redis", self._anywhere())
        time.sleep(self.draw.random())
        self.redis.start()
        self.troubles.append((began, time.monotonic() + 1.0))

    def _hit_network(self) -> None:
        self._await_window(self.workers[:1])
        began = time.monotonic()
        self.proxy.cut()
        self._count("network", set(self._inside(self.workers[0]).values()))
        time.sleep(self.draw.random() * 1.2 * LEASE_S)
        self.proxy.mend()
        self.troubles.append((began, time.monotonic() + 1.0))

    def _hit_pause(self) -> None:
        victim = self._await_window(self.workers)
        victim.kill(signal.SIGSTOP)
        self._count("pause", set(self._inside(victim).values()))
        time.sleep(LEASE_S + 1.0)
        victim.kill(signal.SIGCONT)

    def _anywhere(self) -> set[str]:
        self.trace.update()
        return {where for worker in self.workers for where in self.trace.inside(worker.pid).values()}

    # --- what became of it --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything end; only processes that died by themselves are started again."""
        self._stop.set()
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            for member in [*self.apis, *self.workers]:
                if not member.is_alive:
                    self.counts["died by itself"] += 1
                    print(f"{member.name} died by itself:\n{member.log.read_text()[-2000:]}", file=sys.stderr)
                    member.start()
            if self._unfinished() == 0:
                return
            time.sleep(0.5)

    def _unfinished(self) -> int:
        counts = self.redis.client.hgetall("{foreword}:counts")
        return int(counts.get(b"queued", 0)) + int(counts.get(b"running", 0))

    def report(self) -> dict[str, Any]:
        """Counts of this slice."""
        api = self.apis[0]
        until(lambda: api.answers("/readyz") == 200, 30, "the API is not ready")
        states = Counter(self.client.document(api, file_id)["status"] for file_id in self.accepted)
        self.trace.update()
        jobs = [self._job(key) for key in self.redis.client.scan_iter("{foreword}:job:*")]
        twice = [job for job, count in self.trace.commits.items() if count > 1]
        for job in jobs:
            log = self.redis.client.xrange(f"{{foreword}}:events:{job['id']}")
            if sum(fields[b"t"] == b"done" for _, fields in log) > 1:
                twice.append(job["id"])
        prefills = Counter(job["prefill"] for job in jobs if job["kind"] == "prefill" and job["state"] == "succeeded")
        twice += [prefill for prefill, count in prefills.items() if count > 1]
        lost = len(self.accepted) - states["processed"] + self._unfinished()
        return {
            "engine": self.engine,
            "counts": dict(self.counts),
            "documents": len(self.accepted),
            "states": dict(states),
            "answers": dict(self.answers),
            "jobs": dict(Counter(f"{job['kind']} {job['state']}" for job in jobs)),
            "lost": lost,
            "twice": len(set(twice)),
            "takeover_after_lease_s": self._takeover_times(),
        }

    def _job(self, key: bytes) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.redis.client.hgetall(key).items()}

    def _takeover_times(self) -> list[float]:
        """From a kill to the next claim of what was killed, less the lease, where machine and Redis were there."""
        times = []
        for job, killed_at, process in self.takeovers:
            taken_at = self.trace.taken_over_at(job, killed_at, process)
            if taken_at is None:  # its commit had gone through, say
                continue
            if not any(begin < taken_at and killed_at < end for begin, end in self.troubles):
                times.append(round(taken_at - killed_at - LEASE_S, 3))
                if times[-1] > LATE_S:
                    self._tell(job, killed_at, taken_at)
        return times

    def _tell(self, job: str, killed_at: float, taken_at: float) -> None:
        """All that is known of a late takeover."""
        print(f"{job} was taken over late, {taken_at - killed_at:.2f} s behind the kill:", file=sys.stderr)
        for line in self.trace.lines:
            if killed_at - 1 < line.at < taken_at + 0.1:
                mark = "*" if line.job == job else " "
                print(f" {mark} {line.at - killed_at:+.3f} {line.process} {line.event} {line.job}", file=sys.stderr)

    def close(self) -> None:
        self._stop.set()
        for member in [*self.apis, *self.workers]:
            member.kill(signal.SIGCONT)
            member.kill()
        self.zygote.close()
        self.client.close()
        self.proxy.close()
        self.redis.__exit__(None, None, None)


def run_slice(engine: str, faults: int, seconds: float, seed: int) -> dict[str, Any]:
    if engine == "real":
        resolve_model("default", cache_dir=Settings().resolved().cache_dir)  # converted now, and not by each worker
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        chaos = Chaos(Path(folder), engine=engine, seed=seed)
        try:
            until(lambda: all(api.answers("/readyz") == 200 for api in chaos.apis), 120, "the cluster is not ready")
            users = threading.Thread(target=chaos.work, args=(2 if engine == "real" else 5,), daemon=True)
            users.start()
            chaos.faults(faults, seconds)
            chaos.settle()
            return chaos.report()
        except Exception:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"=== {log.name}\n{log.read_text()[-1500:]}", file=sys.stderr)
            raise
        finally:
            chaos.close()


def combine(slices: list[dict[str, Any]]) -> None:
    """The figures of all slices. Names are those of the project's results."""
    total: Counter[str] = sum((Counter(one["counts"]) for one in slices), Counter())
    times = sorted(time_s for one in slices for time_s in one["takeover_after_lease_s"])
    kills = total["faults"]
    by_kind = {kind: total[kind] for kind in FAULTS}
    real = sum(one["counts"]["faults"] for one in slices if one["engine"] == "real")
    share = total["inside"] / kills

    def entry(name: str, value: float, unit: str, better: Any, samples: list[float], **details: Any) -> None:
        write_entry(name, value, unit, better=better, samples=samples, command=COMMAND, **details)

    entry("kills", kills, "faults", "higher", [], by_kind=by_kind, with_real_engine=real)
    inside = {window: total[f"inside {window}"] for window in WINDOWS}
    entry("kills_in_window_share", share, "share", "higher", [], inside=inside)
    lost, twice = (sum(one[name] for one in slices) for name in ("lost", "twice"))
    documents = sum(one["documents"] for one in slices)
    entry("jobs_lost", lost, "jobs", "lower", [one["lost"] for one in slices], documents=documents)
    entry("jobs_done_twice", twice, "jobs", "lower", [one["twice"] for one in slices], documents=documents)
    entry("takeover_after_lease_s", times[-1], "s", "lower", times, median=times[len(times) // 2], lease_s=LEASE_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("fake", "real"), default="fake")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=130.0, help="no fault begins behind this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="forget earlier slices")
    parser.add_argument("--combine", action="store_true", help="only write the figures of the slices so far")
    arguments = parser.parse_args()
    slices = [] if arguments.fresh or not SLICES.exists() else json.loads(SLICES.read_text(encoding="utf-8"))
    if arguments.combine:
        combine(slices)
        return 0
    result = run_slice(arguments.engine, arguments.faults, arguments.seconds, arguments.seed)
    slices.append(result)
    SLICES.write_text(json.dumps(slices, indent=1) + "\n", encoding="utf-8")
    shown = {**result, "takeover_after_lease_s": sorted(result["takeover_after_lease_s"])[-5:]}
    print(json.dumps(shown, indent=1))
    return int(result["lost"] > 0 or result["twice"] > 0 or result["answers"].get("wrong", 0) > 0)


if __name__ == "__main__":
    sys.exit(main())
