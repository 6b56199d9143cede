"""What the metrics cost: `python -m loadtests.metrics_overhead`.

Times what the API and the worker count for one warm question, into real files as `foreword serve` does, and what they
count for one prefill, beside the time of a short real prefill. Goals: 50 µs a request, 1 % of a prefill.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from engine.interfaces import PrefillResult, RecallReport
from loadtests.results import write_entry
from service.metrics import Metrics
from service.metrics_folder import begin_metrics

COMMAND = "python -m loadtests.metrics_overhead"
MODEL, TENANT, ROUTE = "smollm2-135m-long", "local", "/v1/chat/completions"
TOKENS = 32  # of the answer
PREFILL_STEPS = 60
SHORT_PREFILL_S = 0.5  # of about 500 tokens on two cores: no prefill that is worth a document is shorter
ROUNDS, CALLS = 15, 400


def request(metrics: Metrics) -> None:
    """What the API counts for one request (service.middleware)."""
    metrics.http_requests.labels("POST", ROUTE, "200").inc()
    metrics.http_seconds.labels("POST", ROUTE).observe(0.4)


def claimed(metrics: Metrics) -> None:
    """What a claimed job counts (service.stages.context)."""
    metrics.stage_seconds.labels("queue").observe(0.002)
    metrics.tenant_queue_seconds.labels(metrics.tenant(TENANT)).observe(0.002)


def answer(metrics: Metrics) -> None:
    """What the worker counts for one warm answer besides (service.stages.answer, service.scheduler)."""
    claimed(metrics)
    metrics.kv_decisions.labels("reused").inc()
    metrics.first_token(MODEL, "warm_disk", 0.2, {"queue": 0.002, "kv_store": 0.05, "answer": 0.148})
    for _ in range(2):  # in a second of computing
        metrics.device_seconds.labels("cpu", "answer").inc(0.5)
    metrics.generated_tokens.inc(TOKENS)
    metrics.prompt_tokens.labels("cached").inc(10_000)
    metrics.prompt_tokens.labels("computed").inc(40)
    metrics.tenant_tokens.labels(TENANT, "prompt").inc(40)
    metrics.tenant_tokens.labels(TENANT, "generated").inc(TOKENS)
    metrics.stage_seconds.labels("answer").observe(1.0)
    metrics.answer_seconds.labels(MODEL).observe(1.0)
    metrics.jobs_ended.labels("answer", "succeeded").inc()
    metrics.stage_seconds.labels("kv_store").observe(0.05)


def prefill(metrics: Metrics) -> None:
    """What one prefill counts."""
    recall = RecallReport(target=0.95, mean=0.96, p5=0.9, worst=0.8, below_target=False)
    heads = {"dense": 30, "a_shape": 20, "vertical_slash": 20, "block_sparse": 20}
    claimed(metrics)
    for _ in range(PREFILL_STEPS):
        metrics.device_seconds.labels("cpu", "prefill").inc(0.5)
    metrics.prefill_ended(PrefillResult(10_000, 0, 0, 0, 0.4, recall, heads, 8.0), "repo")
    metrics.first_token(MODEL, "cold", 9.0, {"ingest": 0.5, "queue": 0.01, "prefill": 8.4, "kv_store": 0.1})
    metrics.jobs_ended.labels("prefill", "succeeded").inc()
    metrics.stage_seconds.labels("kv_store").observe(0.05)


def microseconds(metrics: Metrics, work: Callable[[Metrics], None]) -> list[float]:
    """Of one call, in each of ROUNDS rounds."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            work(metrics)
        rounds.append((time.perf_counter() - started) / CALLS * 1e6)
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("--no-write", action="store_true", help="print only, leave summary.json alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        begin_metrics(Path(folder))
        metrics = Metrics()
        metrics.serving(MODEL, "cpu")
        parts = {work.__name__: microseconds(metrics, work) for work in (request, answer, prefill)}
        started = time.perf_counter()
        text = metrics.render()
        scrape_ms = (time.perf_counter() - started) * 1e3
    for name, rounds in parts.items():
        print(f"{name:8} {statistics.median(rounds):7.1f} µs (least {min(rounds):.1f}, most {max(rounds):.1f})")
    print(f"scrape   {scrape_ms:7.1f} ms, {len(text):,} bytes")
    per_request = [sum(rounds) for rounds in zip(parts["request"], parts["answer"], strict=True)]
    share = statistics.median(parts["prefill"]) / 1e6 / SHORT_PREFILL_S
    print(f"one question {statistics.median(per_request):.1f} µs, of a prefill of {SHORT_PREFILL_S} s {share:.3%}")
    if not options.no_write:
        write_entry(
            "metrics_overhead_us",
            statistics.median(per_request),
            "µs",
            better="lower",
            samples=per_request,
            command=COMMAND,
            answer_tokens=TOKENS,
            request_us=statistics.median(parts["request"]),
            answer_us=statistics.median(parts["answer"]),
            prefill_us=statistics.median(parts["prefill"]),
            share_of_short_prefill=share,
            scrape_ms=scrape_ms,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
