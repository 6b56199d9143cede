"""What a soak must hold, and whether it did."""

from dataclasses import asdict, dataclass, field
from typing import Any

from loadtests.http.slope import growth_share, theil_sen
from loadtests.http.soak_load import GONE

MIB = 1 << 20
WARM_SHARE = 1 / 3  # of a process's requests are its warm-up: caches and pools fill
# A worker is judged by its longest life, behind the last kill.
RSS_SHARE = 0.05
HANDLES = THREADS = 4
WAL_BYTES = 64 * MIB  # SQLite takes it over each few MB; a reader may hold it up for a while
ALLOWED: dict[str, set[str]] = {
    "upload": {"ok"},
    "ask": {"ok", *GONE},
    "ask new": {"ok", *GONE},
    "leave answer": {"ok", "left", *GONE},
    "leave prefill": {"ok", "left", *GONE},
    "withdraw": {"ok"},
    "delete": {"ok", *GONE},
    "refused": {"unsupported_format"},
    "look": {"ok"},
}


@dataclass
class Verdict:
    """`faults`: in words, what didn't hold. `growth`: over the requests behind the warm-up."""

    growth: dict[str, float]
    faults: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.faults

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{name}: {value:.4g}" for name, value in self.growth.items()]
        return "\n".join([*lines, *(f"FAULT: {fault}" for fault in self.faults), "passed" if self.passed else "failed"])


def judge(record: dict[str, Any]) -> Verdict:
    samples: list[dict[str, Any]] = record["samples"]
    growth: dict[str, float] = {}
    faults: list[str] = []
    for process in ("api", "worker"):
        rows = _life(samples, process, record["kills"])
        if len(rows) < 10:
            faults.append(f"{len(rows)} samples of the {process}: 10 are needed to see a slope")
            growth[f"{process}_rss_share"] = float("nan")
            continue
        requests = [row["requests"] for row in rows]
        span = requests[-1] - requests[0]
        for name in ("rss", "uss"):
            growth[f"{process}_{name}_share"] = growth_share(requests, [row[process][f"{name}_bytes"] for row in rows])
        for name, limit in (("handles", HANDLES), ("threads", THREADS)):
            grown = theil_sen(requests, [row[process][name] for row in rows]) * span
            growth[f"{process}_{name}"] = grown
            if grown > limit:
                faults.append(f"{process}: {grown:.0f} more {name}, {limit} are allowed")
        if growth[f"{process}_rss_share"] > RSS_SHARE:
            faults.append(
                f"{process}: memory grows by {growth[f'{process}_rss_share']:.1%}, {RSS_SHARE:.0%} is allowed"
            )
    faults += _disk(record, growth)
    faults += _answers(record)
    return Verdict(growth, faults)


def _life(samples: list[dict[str, Any]], process: str, kills: list[int]) -> list[dict[str, Any]]:
    """Samples of the process that lived at the end, without its warm-up."""
    rows = [sample for sample in samples if sample[process] is not None]
    if not rows:
        return []
    rows = [row for row in rows if row[process]["pid"] == rows[-1][process]["pid"]]
    first, last = rows[0]["requests"], rows[-1]["requests"]
    return [row for row in rows if row["requests"] >= first + WARM_SHARE * (last - first)]


def _disk(record: dict[str, Any], growth: dict[str, float]) -> list[str]:
    rows = _life(record["samples"], "api", [])
    if len(rows) < 2:
        return ["no samples of the disk"]
    faults = []
    requests = [row["requests"] for row in rows]
    highest = max(row["disk"].get("kv", 0) for row in record["samples"])
    if highest > record["caps"]["kv_disk_bytes"] + MIB:
        faults.append(f"KV took {highest} bytes, its cap is {record['caps']['kv_disk_bytes']}")
    if not record["evictions"]:
        faults.append("nothing was evicted: the cap is too wide for this load")
    growth["kv_highest_bytes"] = highest
    growth["wal_highest_bytes"] = max(_named(row, "-wal") for row in record["samples"])
    if growth["wal_highest_bytes"] > WAL_BYTES:
        faults.append(f"SQLite's log grew to {growth['wal_highest_bytes']:.0f} bytes, {WAL_BYTES} are allowed")
    # Jobs are kept for a day: the database grows by so much a request until then, and no further.
    growth["database_bytes_a_request"] = theil_sen(requests, [_named(row, ".sqlite") for row in rows])
    for name in ("uploads", "documents"):
        growth[f"{name}_share"] = growth_share(requests, [row["disk"].get(name, 0) for row in rows])
    left = record["disk_after_deleting_all"]
    for name in ("uploads", "documents", "kv", "resume"):
        if left.get(name, 0) > MIB:
            faults.append(f"{left[name]} bytes are left of {name} when everything was deleted")
    return faults


def _named(row: dict[str, Any], end: str) -> int:
    return sum(size for name, size in row["disk"].items() if name.endswith(end))


def _answers(record: dict[str, Any]) -> list[str]:
    faults = []
    for outcome, count in record["tally"].items():
        step, _, code = outcome.rpartition(" ")
        if code not in ALLOWED.get(step, ()):
            faults.append(f"{step}: {code}, {count} times")
    for step in ALLOWED:
        if not any(outcome.rpartition(" ")[0] == step for outcome in record["tally"]):
            faults.append(f"no {step} was tried")
    if record["answers_changed"]:
        faults.append(f"{len(record['answers_changed'])} answers changed, first: {record['answers_changed'][0]}")
    if record["emptied_s"] is None:
        faults.append("jobs were left in the queue when everybody had gone")
    if not record["worker_lives_at_end"]:
        faults.append("no worker lived at the end")
    if record["tracebacks"]:
        faults.append(f"{record['tracebacks']} tracebacks in the server's log")
    return faults
