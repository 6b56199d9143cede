"""Prometheus metrics, right with several processes: each writes its own files, a scrape of any of them adds all up.

The library decides when it is imported whether values go to files, by PROMETHEUS_MULTIPROC_DIR: whoever starts a
process sets that before this module is imported (`service.metrics_folder`). Files outlive a kill -9 of their process.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from engine.interfaces import PrefillResult
from service.metrics_folder import VARIABLE
from service.queue.base import Queue

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3.5, 5, 7.5, 10, 15, 20, 35, 60, 120, 300, 600, 1200, 3600)
STAGE_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 3600)
RATE_BUCKETS = (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
SHARE_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)


class Metrics:
    """One of these a process. Names and labels are those of the dashboard."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self.time_to_first_token = histogram(
            "foreword_time_to_first_token_seconds",
            "Cold: from upload complete to first token ready; warm: from request arrival",
            TTFT_BUCKETS,
            "model",
            "cache_state",
        )
        self.stage_seconds = histogram("foreword_stage_seconds", "Time in each stage", STAGE_BUCKETS, "stage")
        self.prompt_tokens = counter("foreword_prompt_tokens", "Prompt tokens, computed or taken from KV", "source")
        self.generated_tokens = counter("foreword_generated_tokens", "Tokens of answers")
        self.prefills = counter("foreword_prefills", "Prefills that ended, by what was stored before", "cache_state")
        self.prefills_resumed = counter("foreword_prefills_resumed", "Prefills that went on from a resume point")
        self.prefill_rate = histogram(
            "foreword_prefill_tokens_per_second", "Tokens computed a second of a prefill", RATE_BUCKETS
        )
        self.prefill_density = histogram("foreword_prefill_density", "Causal pairs kept by a prefill", SHARE_BUCKETS)
        self.prefill_recall = histogram("foreword_prefill_recall", "Mean softmax mass kept by a prefill", SHARE_BUCKETS)
        self.heads = counter("foreword_heads", "KV-head groups of prefills, by pattern", "pattern")
        self.layers_recomputed = counter("foreword_layers_recomputed", "Layers computed again behind a resume point")
        self.jobs_ended = counter("foreword_jobs_ended", "Jobs by kind and how they ended", "kind", "state")
        self.lease_reclaims = counter("foreword_lease_reclaims", "Jobs taken back from silent workers")
        self.worker_restarts = counter("foreword_worker_restarts", "Workers that died and were started again")
        self.kv_evictions = counter("foreword_kv_evictions", "Segments evicted from a tier", "tier", "reason")
        self.kv_checksum_failures = counter("foreword_kv_checksum_failures", "Stored blocks that were found damaged")
        self.kv_decisions = counter("foreword_kv_decisions", "How a prefix's KV was come by", "decision")
        self.summary_quotes = counter("foreword_summary_quotes", "Quotes of summaries, verified or dropped", "outcome")
        self.kernel_path = Gauge(
            "foreword_kernel_path",
            "1 for the path that an operation takes",
            ("op", "path"),
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.gpu_memory = Gauge(
            "foreword_gpu_memory_bytes",
            "Peak memory allocated on the GPU",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.http_requests = counter("foreword_http_requests", "Requests by route", "method", "route", "status")
        self.http_seconds = histogram(
            "foreword_http_request_seconds", "Time until a response was complete", STAGE_BUCKETS, "method", "route"
        )

    def prefill_ended(self, result: PrefillResult) -> None:
        """Everything a finished prefill says about itself, but for its TTFT."""
        computed = result.num_tokens - result.cached_tokens
        self.prompt_tokens.labels("computed").inc(computed)
        self.prompt_tokens.labels("cached").inc(result.cached_tokens)
        self.prefills.labels("partial" if result.cached_tokens else "cold").inc()
        self.stage_seconds.labels("prefill").observe(result.seconds)
        if result.resumed_from_layer:
            self.prefills_resumed.inc()
        self.layers_recomputed.inc(result.layers_recomputed)
        self.prefill_density.observe(result.density)
        if result.recall is not None:
            self.prefill_recall.observe(result.recall.mean)
        for pattern, count in result.heads.items():
            self.heads.labels(pattern).inc(count)
        if computed and result.seconds > 0:
            self.prefill_rate.observe(computed / result.seconds)

    def quotes_checked(self, *, verified: int, dropped: int) -> None:
        self.summary_quotes.labels("verified").inc(verified)
        self.summary_quotes.labels("dropped").inc(dropped)

    def kv_counted(self, name: str, labels: tuple[str, ...], amount: int) -> None:
        """Takes the KV store's own counts (engine.kv_store.counters.OnCount)."""
        if name == "evictions":
            self.kv_evictions.labels(*labels).inc(amount)
        elif name == "checksum_failures":
            self.kv_checksum_failures.inc(amount)

    def render(self, *collectors: Collector) -> bytes:
        """The text of a scrape: this process's values, or all processes' where they share a folder."""
        if VARIABLE not in os.environ:
            return generate_latest(self.registry) + generate_latest(_registry_of(collectors))
        registry = _registry_of(collectors)
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


def _registry_of(collectors: Iterable[Collector]) -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


class StateCollector(Collector):
    """What is asked of queue and KV store at each scrape, since any process may have changed it."""

    def __init__(self, queue: Queue, kv_usage: Callable[[], Mapping[str, int]]) -> None:
        """`kv_usage` returns bytes by tier."""
        self._queue = queue
        self._kv_usage = kv_usage

    def collect(self) -> Iterable[Metric]:
        jobs = GaugeMetricFamily("foreword_jobs", "Jobs by state", labels=["state"])
        counts = self._queue.counts()
        for state in ("queued", "running", "succeeded", "failed", "cancelled", "dead"):
            jobs.add_metric([state], counts.get(state, 0))
        yield jobs
        age = GaugeMetricFamily("foreword_oldest_job_age_seconds", "Age of the oldest waiting job")
        age.add_metric([], self._queue.oldest_queued_age_s())
        yield age
        kv_bytes = GaugeMetricFamily("foreword_kv_bytes", "Stored KV by tier", labels=["tier"])
        for tier, size_bytes in self._kv_usage().items():
            kv_bytes.add_metric([tier], size_bytes)
        yield kv_bytes


def forget_process(pid: int) -> None:
    """A process died: its live gauges go, its counts stay."""
    mark_process_dead(pid)  # type: ignore[no-untyped-call]
