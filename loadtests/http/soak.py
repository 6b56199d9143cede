"""Half an hour of everything at once, and whether memory, handles and disk stay flat: `python -m loadtests.http.soak`.

A real server under a small KV cap: uploads, questions, deletions, clients that leave, refusals and evictions; the
worker is killed every few minutes in the first half, and left alone in the second, so that its memory can be seen too.
Growth is a robust slope over *requests*, not over time: a machine that stops the run for a while changes nothing.
Writes results/soak.json, a plot and two figures of summary.json.
"""

import argparse
import json
import math
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.threads import share_cores
from loadtests.http.checks import until_empty
from loadtests.http.client import Client
from loadtests.http.plots import plot_soak
from loadtests.http.scrape import scrape
from loadtests.http.server import LocalServer
from loadtests.http.soak_load import Shelf, User
from loadtests.http.soak_verdict import Verdict, judge
from loadtests.http.texts import Texts
from loadtests.http.usage import Sampler, disk_usage
from loadtests.results import SUMMARY, commit, cpu_name, versions, write_entry

RESULTS = SUMMARY.parent
MIB = 1 << 20
EMPTY_S = 120.0
SETTLE_LOOKS = 60


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    share_cores()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.record is None:
        record = soak(options, until_told())
        record |= {"device": cpu_name(), "versions": versions(), "commit": commit()}
        (options.out / "soak.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    else:
        record = json.loads(options.record.read_text(encoding="utf-8"))
    verdict = judge(record)
    record["verdict"] = verdict.as_json()
    (options.out / "soak.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    plot_soak(record, options.out / "soak.png")
    print(verdict)
    if not options.dry:
        write_figures(record, verdict)
    return 0 if verdict.passed else 1


def until_told() -> threading.Event:
    """Set by SIGTERM or Ctrl-C: a run that is ended early is judged by what it had."""
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    return told


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=35.0)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--think-s", type=float, default=0.5, help="between two steps of a user, on average")
    parser.add_argument("--documents", type=int, default=12, help="on the shelf; more than the KV cap holds")
    parser.add_argument("--sizes", type=int, nargs=2, default=(200, 1000), metavar="TOKENS")
    parser.add_argument("--kill-every-s", type=float, default=150.0)
    parser.add_argument("--kv-mib", type=int, default=160, help="cap of KV on disk")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--record", type=Path, help="judge this soak.json again instead of a new run")
    parser.add_argument("--dry", action="store_true", help="write no figure into summary.json")
    return parser


def soak(options: argparse.Namespace, told: threading.Event) -> dict[str, Any]:
    """Everything that was counted and sampled until the time was over, or `told` set."""
    shelf = Shelf(most=options.documents)
    caps = {
        "kv_disk_bytes": options.kv_mib * MIB,
        "kv_host_bytes": options.kv_mib * MIB // 4,
        "resume_bytes": 512 * MIB,
        "disk_floor_bytes": 0,
        "max_attempts": 10,  # a worker killed while it had the job costs one
    }
    with tempfile.TemporaryDirectory(prefix="foreword-soak-") as folder, LocalServer(Path(folder), **caps) as server:
        texts, stop, users = Texts(options.seed), threading.Event(), list[threading.Thread]()
        for number in range(options.users):
            chance, client = random.Random(f"{options.seed}:{number}"), Client(server.url)
            user = User(client, shelf, texts, chance, sizes=tuple(options.sizes), think_s=options.think_s)
            users.append(threading.Thread(target=user.run, args=(stop,), name=f"user-{number}", daemon=True))
        samples = options.out / "soak.jsonl"
        sampler = Sampler(server, lambda: shelf.requests, every_s=10, every_requests=50, out=samples)
        with sampler:
            for thread in users:
                thread.start()
            kills = _let_run(server, sampler, shelf, options, told)
            stop.set()
            for thread in users:
                thread.join()
            emptied_s = until_empty(Client(server.url), None, EMPTY_S)
        samples.unlink()  # soak.json has them too
        worker_lives_at_end = server.worker is not None
        evictions = scrape(server.url).total("foreword_kv_evictions_total", tier="disk")
        left = _delete_all(server, shelf)
        log = server.log.read_text(encoding="utf-8", errors="replace")
    return {
        "minutes": round(sampler.awake_s / 60, 2),
        "requests": shelf.requests,
        "kills": kills,
        "caps": caps,
        "tally": dict(sorted(shelf.tally.items())),
        "answers_checked": shelf.asked,
        "answers_changed": shelf.changed,
        "numbers_found": shelf.found,
        "evictions": evictions,
        "emptied_s": emptied_s,
        "worker_lives_at_end": worker_lives_at_end,
        "disk_after_deleting_all": left,
        "tracebacks": log.count("Traceback"),
        "samples": sampler.samples,
    }


def _let_run(
    server: LocalServer, sampler: Sampler, shelf: Shelf, options: argparse.Namespace, told: threading.Event
) -> list[int]:
    """For so many minutes awake; returns how many requests had ended at each kill."""
    kills: list[int] = []
    while sampler.awake_s < 60 * options.minutes and not told.wait(0.5):
        due = (len(kills) + 1) * options.kill_every_s
        if sampler.awake_s >= due and due < 30 * options.minutes:
            server.kill_worker()
            kills.append(shelf.requests)
            print(f"{sampler.awake_s / 60:.1f} min, {shelf.requests} requests: worker killed", flush=True)
    return kills


def _delete_all(server: LocalServer, shelf: Shelf) -> dict[str, int]:
    """Bytes in the data folder when every handle was deleted and the worker's chores have gone over it."""
    client = Client(server.url)
    listed, _ = client.get("/v1/files?limit=1000")
    for file in listed.get("data", []):
        client.delete(file["id"])
    shelf.take_all()
    for _ in range(SETTLE_LOOKS):  # a second each, or more where this process is stopped
        left = disk_usage(server.data_dir)
        if not left.get("documents") and not left.get("uploads") and left.get("kv", 0) < MIB:
            break
        time.sleep(1.0)
    return disk_usage(server.data_dir)


def write_figures(record: dict[str, Any], verdict: Verdict) -> None:
    command = "python -m loadtests.http.soak"
    details = {"requests": record["requests"], "worker_kills": len(record["kills"])}
    write_entry(
        "soak_minutes",
        record["minutes"],
        "min",
        better="higher",
        samples=[record["minutes"]],
        command=command,
        **details,
    )
    shares = [verdict.growth["api_rss_share"], verdict.growth["worker_rss_share"]]
    if not all(map(math.isfinite, shares)):
        return  # too short to see a slope, which is among the faults
    write_entry(
        "soak_rss_growth_share",
        max(shares),
        "share",
        better="lower",
        samples=shares,
        command=command,
        processes=["api", "worker"],
        **details,
    )


if __name__ == "__main__":
    sys.exit(main())
