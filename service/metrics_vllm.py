"""The same values under vLLM's names (FOREWORD_METRICS_VLLM_NAMES), for dashboards and autoscalers made for vLLM.

Names and meanings are those of vLLM's V1 engine, https://docs.vllm.ai/en/stable/usage/metrics/.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Sample

# vLLM's name → ours, of histograms; then of counters. Labels other than the model are summed over.
HISTOGRAMS: Mapping[str, str] = {
    "vllm:time_to_first_token_seconds": "foreword_time_to_first_token_seconds",
    "vllm:e2e_request_latency_seconds": "foreword_answer_seconds",
}
COUNTERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "vllm:prompt_tokens": ("foreword_prompt_tokens", {}),
    "vllm:generation_tokens": ("foreword_generated_tokens", {}),
    "vllm:prefix_cache_queries": ("foreword_prompt_tokens", {}),
    "vllm:prefix_cache_hits": ("foreword_prompt_tokens", {"source": "cached"}),
    "vllm:request_success": ("foreword_jobs_ended", {"kind": "answer", "state": "succeeded"}),
}
GAUGES: Mapping[str, Mapping[str, str]] = {
    "vllm:num_requests_running": {"state": "running"},
    "vllm:num_requests_waiting": {"state": "queued"},
}


def vllm_names(model: str) -> Callable[[list[Metric]], list[Metric]]:
    """What makes the aliases of one scrape. `model` becomes the label model_name."""

    def rename(found: list[Metric]) -> list[Metric]:
        samples = {metric.name: metric.samples for metric in found}
        made = [_histogram(alias, samples.get(name, ()), model) for alias, name in HISTOGRAMS.items()]
        for alias, (name, wanted) in COUNTERS.items():
            counted = CounterMetricFamily(alias, f"{name}, as vLLM names it", labels=["model_name"])
            counted.add_metric([model], _sum(samples.get(name, ()), f"{name}_total", wanted))
            made.append(counted)
        # A worker by itself knows nothing of the queue, an API of several machines nothing of KV.
        for alias, wanted in GAUGES.items() if "foreword_jobs" in samples else ():
            jobs = GaugeMetricFamily(alias, "foreword_jobs, as vLLM names it", labels=["model_name"])
            jobs.add_metric([model], _sum(samples.get("foreword_jobs", ()), "foreword_jobs", wanted))
            made.append(jobs)
        used, cap = (
            _sum(samples.get(name, ()), name, {"tier": "disk"})
            for name in ("foreword_kv_bytes", "foreword_kv_cap_bytes")
        )
        if cap:
            usage = GaugeMetricFamily(
                "vllm:kv_cache_usage_perc", "Stored KV on disk, share of its cap", labels=["model_name"]
            )
            usage.add_metric([model], used / cap)
            made.append(usage)
        return made

    return rename


def _sum(samples: Iterable[Sample], name: str, labels: Mapping[str, str]) -> float:
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


def _histogram(alias: str, samples: Sequence[Sample], model: str) -> Metric:
    buckets: dict[str, float] = {}
    total = 0.0
    for sample in samples:
        if sample.name.endswith("_bucket"):
            buckets[sample.labels["le"]] = buckets.get(sample.labels["le"], 0.0) + sample.value
        elif sample.name.endswith("_sum"):
            total += sample.value
    family = HistogramMetricFamily(alias, f"{alias.partition(':')[2]}, all cache states", labels=["model_name"])
    if buckets:
        family.add_metric([model], sorted(buckets.items(), key=lambda item: float(item[0])), total)
    return family
