"""All scenarios against one server, and a report: `python -m loadtests.http`.

Without --url a `foreword serve` of one's own with the default model and keys of several tenants is started. Each
scenario is a locust process; what must hold behind it is checked. Writes http.json, http.html and http.png into
loadtests/results, where scenarios that weren't run this time stay as they were, and `warm_p99_ratio_32_users`
into summary.json.
"""

import argparse
import json
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.threads import share_cores
from loadtests.http import field_client
from loadtests.http.checks import check_kept, check_samples, check_storm
from loadtests.http.clocks import compare_clocks
from loadtests.http.report import write_report
from loadtests.http.samples import Sample, percentile, read_samples, summarize
from loadtests.http.scrape import scrape
from loadtests.http.server import LocalServer
from loadtests.results import SUMMARY, commit, cpu_name, versions, write_entry

COMMAND = "python -m loadtests.http"
LOCUSTFILE = Path(__file__).with_name("locustfile.py")
SCENARIOS = {
    "cold": "ColdUploads",
    "warm": "WarmQuestions",
    "users": "WarmUsers",
    "tenants": "MixedTenants",
    "storm": "DisconnectStorm",
    "client": field_client.NAME,
}
TENANTS = ("flood", "quiet", "calm")
USERS = 32


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server ends with it
    share_cores()
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foreword-load-")))
        keys = own_keys() if options.url is None else json.loads(options.keys.read_text()) if options.keys else {}
        url = options.url or stack.enter_context(LocalServer(folder, keys=keys)).url
        run = Run(url, keys, folder, options)
        for name in options.only or SCENARIOS:
            print(f"=== {name}", flush=True)
            run.scenario(name)
    told = {
        "device": cpu_name() if options.url is None else options.url,
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_report({name: {**result, **told} for name, result in run.results.items()}, options.out)
    for name, result in run.results.items():
        for fault in result["faults"]:
            print(f"FAULT in {name}: {fault}", file=sys.stderr)
    return 1 if any(result["faults"] for result in run.results.values()) else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--keys", type=Path, help="with --url: JSON file {key: tenant}; one tenant is 'admin'")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), metavar="NAME", help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals in each scenario")
    parser.add_argument("--cold-rate", type=float, default=0.1, help="uploads a second")
    parser.add_argument("--rate", type=float, default=0.5, help="arrivals a second in the other scenarios")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 2000, 4000], help="lengths of documents")
    parser.add_argument("--warm-objective-s", type=float, default=1.0, help="TTFT of a good warm answer")
    parser.add_argument("--cold-objective-s", type=float, default=15.0, help="of a good cold one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=SUMMARY.parent)
    parser.add_argument("--dry", action="store_true", help="write no figure into summary.json")
    return parser


def own_keys() -> dict[str, str]:
    return {secrets.token_urlsafe(24): tenant for tenant in ("admin", *TENANTS)}


class Run:
    """`results` by scenario: figures, faults in words, and the samples."""

    def __init__(self, url: str, keys: dict[str, str], folder: Path, options: argparse.Namespace) -> None:
        self.url, self.keys, self.folder, self.options = url, keys, folder, options
        self.results: dict[str, dict[str, Any]] = {}
        self._key = {tenant: key for key, tenant in keys.items()}
        self._tenants = [tenant for tenant in self._key if tenant != "admin"]

    def scenario(self, name: str) -> None:
        if name == "users":
            self._users()
        elif name == "client":
            self._client()
        else:
            self._locust(name, name)

    def _locust(self, name: str, scenario: str, users: int = 1) -> list[Sample]:
        """Runs one, records its figures and what doesn't hold behind it; returns its samples."""
        options, path = self.options, self.folder / f"{name}.jsonl"
        rate = options.cold_rate if scenario == "cold" else options.rate
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), SCENARIOS[scenario], "--headless"]
        command += ["--users", str(users), "--spawn-rate", "100", "--host", self.url, "--samples", str(path)]
        command += ["--rate", str(rate), "--seconds", str(options.seconds), "--seed", str(options.seed)]
        command += ["--tokens", *map(str, options.tokens), "--only-summary", "--loglevel", "ERROR"]
        command += [part for tenant in self._tenants for part in ("--key", f"{tenant}={self._key[tenant]}")]
        before = scrape(self.url)
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        samples = read_samples(path) if path.exists() else []
        faults = check_samples(samples)
        if ended.returncode not in (0, 1):  # 1: requests failed, which is among the faults
            faults.append(f"locust ended with {ended.returncode}: {ended.stderr[-1500:]}")
        figures: dict[str, float] = {}
        if scenario == "storm":
            found, figures = check_storm(self.url, self._key.get("admin"), before, samples)
            faults += found
        if scenario in ("storm", "cold"):
            found, kept = check_kept(self.url, {self._key[tenant]: tenant for tenant in self._tenants})
            faults += found
            figures["documents_kept"] = kept
        objectives = {"warm": options.warm_objective_s, "cold": options.cold_objective_s}
        summary = summarize(samples, objectives_s=objectives)
        clocks = compare_clocks(samples, scrape(self.url).since(before))
        result = {**summary, "figures": figures, "clocks": clocks, "faults": faults}
        result["load"] = f"{users} open at all times" if scenario == "users" else f"{rate} arrivals/s"
        self.results[name] = {**result, "samples": [asdict(sample) for sample in samples]}
        print(json.dumps({key: self.results[name][key] for key in ("arrivals", "completed", "errors", "figures")}))
        return samples

    def _users(self) -> None:
        """p99 of warm TTFT with 32 questions open at all times, over that with one."""
        tails, numbers = {}, {}
        for users in (1, USERS):
            samples = self._locust(f"users_{users}", "users", users)
            warm = warm_ttfts(samples)
            tails[users], numbers[users] = percentile(warm, 0.99), len(warm)
        if not all(numbers.values()):
            self.results[f"users_{USERS}"]["faults"].append(f"warm answers of 1 and {USERS} users: {numbers}")
            return
        ratio = tails[USERS] / tails[1]
        print(f"warm p99: {tails[1]:.3f} s of one user, {tails[USERS]:.3f} s of {USERS}: {ratio:.2f} times")
        if not self.options.dry:
            write_entry(
                "warm_p99_ratio_32_users",
                ratio,
                "ratio",
                better="lower",
                samples=[tails[1], tails[USERS]],
                command=f"{COMMAND} --only users",
                questions=[numbers[1], numbers[USERS]],
                tokens=self.options.tokens,
            )

    def _client(self) -> None:
        key = self._key[self._tenants[0]] if self._tenants else None
        result = field_client.run_aiperf(self.url, key, self.folder / "client", seed=self.options.seed)
        self.results["client"] = result
        print(json.dumps(result["runs"]))


def warm_ttfts(samples: Sequence[Sample]) -> list[float]:
    """Of whole answers that were warm, in seconds."""
    whole = [sample for sample in samples if sample.code == "ok" and (sample.cache_state or "").startswith("warm")]
    return [sample.ttft_s for sample in whole if sample.ttft_s is not None]


if __name__ == "__main__":
    sys.exit(main())
