"""Prometheus metrics, right with several processes: each counts into its own files, a scrape of any adds all up.

What is asked of queue, store and disk at a scrape is in `service.metrics_state`; docs/observe.md lists all of it.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.interfaces import PrefillResult
from service.auth import LOCAL_TENANT
from service.metrics_files import FolderCollector, count_into
from service.metrics_folder import VARIABLE
from service.metrics_labels import CodeLabels, Counter, Histogram, Summary, TenantLabels
from service.queue.base import JOB_KINDS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3.5, 5, 7.5, 10, 15, 20, 35, 60, 120, 300, 600, 1200, 3600)
STAGE_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 3600)
RATE_BUCKETS = (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
DENSITY_BUCKETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
RECALL_BUCKETS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 1.0)

STAGES = ("upload", "ingest", "queue", "prefill", "kv_store", "answer")
CACHE_STATES = ("cold", "partial", "warm_host", "warm_disk")
CLASSES = ("repo", "bundle", "doc", "several")
PATTERNS = ("dense", "a_shape", "vertical_slash", "block_sparse")
DECISIONS = (
    "computed",
    "reused",
    "loaded_and_computed",
    "computed_instead",
    "recomputed_damaged",
    "loaded_shared",
    "shared_too_slow",
)

Known = Iterable[tuple[str, ...]]
KVSnapshot = Callable[[], Mapping[tuple[str, ...], int]]


class Metrics:
    """One of these a process. Names and labels are those of the dashboard."""

    def __init__(self, tenants: Iterable[str] = (LOCAL_TENANT,)) -> None:
        """`tenants`: who may have series by name (service.metrics_labels)."""
        self._folder = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None
        if self._folder is not None:
            count_into(self._folder)
        self.registry = registry = CollectorRegistry()
        self.tenant, self.code = TenantLabels(tenants), CodeLabels()
        self.kv_waited_s = 0.0  # of this process, for all time: what waiting for stored KV has cost

        # `known` label values start at 0: a rate can't see the first of a series that begins at 1.
        def counter(name: str, text: str, *labels: str, known: Known = ()) -> Counter:
            made = Counter(name, text, labels, registry=registry)
            for values in known:
                made.labels(*values)
            return made

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str, known: Known = ()) -> Histogram:
            made = Histogram(name, text, labels, buckets=buckets, registry=registry)
            for values in known:
                made.labels(*values)
            return made

        def gauge(name: str, text: str, mode: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry, multiprocess_mode=mode)  # type: ignore[arg-type]

        self.time_to_first_token = histogram(
            "foreword_time_to_first_token_seconds",
            "Cold and partial: from upload complete to first token ready; warm: from request arrival",
            TTFT_BUCKETS,
            "model",
            "cache_state",
        )
        self.first_token_stages = Summary(
            "foreword_time_to_first_token_stage_seconds",
            "The share of each stage in the time to first token: the stages of one observation add up to it",
            ("cache_state", "stage"),
            registry=registry,
        )
        self.answer_seconds = histogram(
            "foreword_answer_seconds", "From a question's arrival to its last token", TTFT_BUCKETS, "model"
        )
        self.stage_seconds = histogram(
            "foreword_stage_seconds",
            "Time in each stage; kv_store: waited for KV to be read (an answer) or written (a prefill)",
            STAGE_BUCKETS,
            "stage",
            known=[(stage,) for stage in STAGES],
        )
        self.uploaded_bytes = counter("foreword_uploaded_bytes", "Bytes of uploads that were kept")
        self.ingested_tokens = counter(
            "foreword_ingested_tokens",
            "Tokens of ingested documents, by class",
            "kind",
            known=[(kind,) for kind in CLASSES[:3]],
        )
        self.prompt_tokens = counter(
            "foreword_prompt_tokens",
            "Prompt tokens, computed or taken from KV",
            "source",
            known=[("computed",), ("cached",)],
        )
        self.generated_tokens = counter("foreword_generated_tokens", "Tokens of answers")
        self.prefills = counter(
            "foreword_prefills",
            "Prefills that ended, by what was stored before",
            "cache_state",
            known=[("cold",), ("partial",)],
        )
        self.prefills_resumed = counter("foreword_prefills_resumed", "Prefills that went on from a resume point")
        self.prefill_rate = histogram(
            "foreword_prefill_tokens_per_second", "Tokens computed a second of a prefill", RATE_BUCKETS
        )
        classes = [(kind,) for kind in CLASSES]
        self.prefill_density = histogram(
            "foreword_prefill_density", "Causal pairs kept by a prefill", DENSITY_BUCKETS, "kind", known=classes
        )
        self.prefill_recall = histogram(
            "foreword_prefill_recall",
            "Mean softmax mass kept by a prefill, where it was sparse",
            RECALL_BUCKETS,
            "kind",
            known=classes,
        )
        self.below_target = counter(
            "foreword_prefills_below_target",
            "Prefills with a part whose recall stayed under the target",
            "kind",
            known=classes,
        )
        self.heads = counter(
            "foreword_heads",
            "KV-head groups of prefills, by pattern",
            "pattern",
            known=[(pattern,) for pattern in PATTERNS],
        )
        self.layers_recomputed = counter("foreword_layers_recomputed", "Layers computed again behind a resume point")
        self.device_seconds = counter(
            "foreword_device_seconds", "Time the engine computed, waiting for KV included", "device", "stage"
        )
        self.jobs_ended = counter(
            "foreword_jobs_ended",
            "Attempts at jobs by kind and how they ended; queued: to be tried again",
            "kind",
            "state",
            known=[(kind, state) for kind in JOB_KINDS for state in ("succeeded", "failed", "dead", "queued")],
        )
        self.job_errors = counter("foreword_job_errors", "Failed attempts at jobs, by error code", "kind", "code")
        self.lease_reclaims = counter("foreword_lease_reclaims", "Jobs taken back from silent workers")
        self.worker_restarts = counter("foreword_worker_restarts", "Workers that died and were started again")
        self.workers = gauge("foreword_workers", "Workers that live, their model loaded", "livesum")
        self.tenant_queue_seconds = Summary(
            "foreword_tenant_queue_seconds",
            "Time jobs waited to be claimed, by tenant (the first 50 of the keys file, then other)",
            ("tenant",),
            registry=registry,
        )
        self.tenant_tokens = counter("foreword_tenant_tokens", "Tokens computed for each tenant", "tenant", "source")
        self.kv_evictions = counter(
            "foreword_kv_evictions",
            "Segments evicted from disk, layers of a segment from host memory",
            "tier",
            "reason",
            known=[("disk", "capacity"), ("disk", "expired"), ("host", "capacity")],
        )
        self.kv_checksum_failures = counter("foreword_kv_checksum_failures", "Stored blocks that were found damaged")
        self.kv_read_errors = counter("foreword_kv_read_errors", "Stored blocks lost to an I/O error or a missing file")
        self.kv_key_misses = counter(
            "foreword_kv_key_misses", "Stored blocks encrypted with a key that is not in FOREWORD_KV_KEY_FILE"
        )
        self.kv_write_errors = counter("foreword_kv_write_errors", "Writings and removals of KV that the disk refused")
        self.kv_index_errors = counter("foreword_kv_index_errors", "Uses of the KV store's index that the disk failed")
        self.kv_dead_sessions = counter(
            "foreword_kv_dead_sessions", "Processes that ended without closing the KV store; what they left was settled"
        )
        self.kv_shared_errors = counter(
            "foreword_kv_shared_errors",
            "Uses of a shared tier that failed",
            "tier",
            known=[("directory",), ("redis",)],
        )
        self.kv_hits = counter(
            "foreword_kv_hits",
            "Segments opened for reading, by the slowest tier they needed",
            "tier",
            known=[("disk",), ("host",), ("shared",)],
        )
        self.kv_misses = counter("foreword_kv_misses", "Prefixes whose KV could not be opened")
        self.kv_read_bytes = counter(
            "foreword_kv_read_bytes", "Bytes of KV read", "tier", known=[("disk",), ("host",), ("shared",)]
        )
        self.kv_written_bytes = counter("foreword_kv_written_bytes", "Bytes of KV written to disk")
        self.kv_decisions = counter(
            "foreword_kv_decisions", "How a prefix's KV was come by", "decision", known=[(name,) for name in DECISIONS]
        )
        self.webhook_deliveries = counter(
            "foreword_webhook_deliveries",
            "Attempts to deliver a webhook, by outcome",
            "outcome",
            known=[("delivered",), ("failed",), ("given_up",)],
        )
        self.summary_quotes = counter("foreword_summary_quotes", "Quotes of summaries, verified or dropped", "outcome")
        self.kernel_path = gauge(
            "foreword_kernel_path", "1 for the path that an operation takes", "livemostrecent", "op", "path"
        )
        self.gpu_memory = gauge("foreword_gpu_memory_bytes", "Memory in use on the GPU", "livemostrecent", "gpu")
        self.gpu_memory_total = gauge("foreword_gpu_memory_total_bytes", "Memory of the GPU", "livemostrecent", "gpu")
        self.gpu_utilization = gauge(
            "foreword_gpu_utilization_ratio", "Share of time that a kernel ran, 0 to 1", "livemostrecent", "gpu"
        )
        self.http_requests = counter("foreword_http_requests", "Requests by route", "method", "route", "status")
        self.http_seconds = histogram(
            "foreword_http_request_seconds", "Time until a response was complete", STAGE_BUCKETS, "method", "route"
        )
        self._kv_counters: dict[str, Counter] = {
            "evictions": self.kv_evictions,
            "checksum_failures": self.kv_checksum_failures,
            "read_errors": self.kv_read_errors,
            "key_misses": self.kv_key_misses,
            "write_errors": self.kv_write_errors,
            "index_errors": self.kv_index_errors,
            "dead_sessions": self.kv_dead_sessions,
            "shared_errors": self.kv_shared_errors,
            "decisions": self.kv_decisions,
            "hits": self.kv_hits,
            "misses": self.kv_misses,
            "read_bytes": self.kv_read_bytes,
            "written_bytes": self.kv_written_bytes,
        }
        self._kv_snapshots: list[tuple[KVSnapshot, dict[tuple[str, ...], int]]] = []  # and what of each is counted
        self._flushing = threading.Lock()

    def serving(self, model: str, device: str) -> None:
        """In a worker, once its model is loaded: its series begin at 0 too, and it counts as one that lives."""
        for state in CACHE_STATES:
            self.time_to_first_token.labels(model, state)
            for stage in STAGES[1:]:
                self.first_token_stages.labels(state, stage)
        self.answer_seconds.labels(model)
        for tenant in self.tenant.names:
            self.tenant_queue_seconds.labels(tenant)
            for source in ("prompt", "generated"):
                self.tenant_tokens.labels(tenant, source)
        for stage in ("prefill", "answer"):
            self.device_seconds.labels(device, stage)
        self.workers.set(1)

    def first_token(self, model: str, cache_state: str, seconds: float, stages: dict[str, float]) -> None:
        """One observation of TTFT. `stages`: seconds of it by stage, adding up to it."""
        self.time_to_first_token.labels(model, cache_state).observe(seconds)
        for stage, part in stages.items():
            self.first_token_stages.labels(cache_state, stage).observe(max(0.0, part))

    def prefill_ended(self, result: PrefillResult, kind: str) -> None:
        """Everything a finished prefill says about itself, but for its TTFT. `kind` is one of CLASSES."""
        computed = result.num_tokens - result.cached_tokens
        self.prompt_tokens.labels("computed").inc(computed)
        self.prompt_tokens.labels("cached").inc(result.cached_tokens)
        self.prefills.labels("partial" if result.cached_tokens else "cold").inc()
        self.stage_seconds.labels("prefill").observe(result.seconds)
        if result.resumed_from_layer:
            self.prefills_resumed.inc()
        self.layers_recomputed.inc(result.layers_recomputed)
        self.prefill_density.labels(kind).observe(result.density)
        if result.recall is not None:
            self.prefill_recall.labels(kind).observe(result.recall.mean)
            self.below_target.labels(kind).inc(result.recall.below_target)
        for pattern, count in result.heads.items():
            self.heads.labels(pattern).inc(count)
        if computed and result.seconds > 0:
            self.prefill_rate.observe(computed / result.seconds)

    def job_failed(self, kind: str, state: str, code: str) -> None:
        """An attempt failed; `state` is what became of the job."""
        self.jobs_ended.labels(kind, state).inc()
        self.job_errors.labels(kind, self.code(code)).inc()

    def quotes_checked(self, *, verified: int, dropped: int) -> None:
        self.summary_quotes.labels("verified").inc(verified)
        self.summary_quotes.labels("dropped").inc(dropped)

    def watch_kv(self, snapshot: KVSnapshot) -> None:
        """Take over the KV store's own counts (engine.kv_store.counters), at each `flush`."""
        self._kv_snapshots.append((snapshot, {}))

    def flush(self) -> None:
        """Count what others count by themselves; due every second or so, and before a process ends."""
        with self._flushing:
            for snapshot, counted in self._kv_snapshots:
                for key, value in snapshot().items():
                    name, *labels = key
                    if (counter := self._kv_counters.get(name)) is not None:
                        (counter.labels(*labels) if labels else counter).inc(value - counted.get(key, 0))
                        counted[key] = value

    def collect(self) -> list[Metric]:
        """This process's values, or all processes' where they share a folder."""
        self.flush()
        return list(self.registry.collect() if self._folder is None else FolderCollector(self._folder).collect())

    def render(
        self, *collectors: Collector, rename: Callable[[list[Metric]], list[Metric]] = lambda found: []
    ) -> bytes:
        """The text of a scrape: these values and the collectors', and what `rename` makes of all of them besides."""
        found = [*self.collect(), *(metric for collector in collectors for metric in collector.collect())]
        return generate_latest(_Collected([*found, *rename(found)]))


class _Collected(Collector):
    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> list[Metric]:
        return self._found
