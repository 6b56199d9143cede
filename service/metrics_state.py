"""What is asked of queue, KV store and disk at each scrape, since any process may have changed it."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.metrics_labels import TenantLabels
from service.queue.base import JobState, Queue
from service.settings import Settings

JOB_STATES: tuple[JobState, ...] = ("queued", "running", "succeeded", "failed", "cancelled", "dead")

# name → labels, meaning
STATE: Mapping[str, tuple[tuple[str, ...], str]] = {
    "foreword_jobs": (("state",), "Jobs by state; ended ones are remembered for a day"),
    "foreword_oldest_job_age_seconds": ((), "Age of the oldest waiting job"),
    "foreword_tenant_jobs": (
        ("tenant", "state"),
        "Unfinished jobs by tenant (the first 50 of the keys file, then other)",
    ),
    "foreword_kv_bytes": (("tier",), "Stored KV"),
    "foreword_kv_cap_bytes": (("tier",), "Cap of stored KV"),
    "foreword_uploads_bytes": ((), "Bytes of all uploads that a handle names"),
    "foreword_uploads_cap_bytes": ((), "Cap of uploads"),
    "foreword_disk_free_bytes": ((), "Free bytes where KV lies (a worker's), or uploads (an API's)"),
    "foreword_disk_floor_bytes": ((), "Free bytes that are never used"),
}


class StateCollector(Collector):
    """Values that several API processes would all report alike: dashboards take their maximum, not their sum."""

    def __init__(
        self,
        settings: Settings,
        queue: Queue,
        kv_usage: Callable[[], Mapping[str, int]],
        uploaded_bytes: Callable[[], int],
        *,
        tenant: TenantLabels,
    ) -> None:
        """`kv_usage` returns bytes by tier: nothing where workers elsewhere have the KV, and show it themselves."""
        self._settings = settings
        self._queue = queue
        self._kv_usage = kv_usage
        self._uploaded_bytes = uploaded_bytes
        self._tenant = tenant

    def collect(self) -> Iterable[Metric]:
        settings, counts = self._settings, self._queue.counts()
        yield _family("foreword_jobs", {(state,): counts.get(state, 0) for state in JOB_STATES})
        yield _family("foreword_oldest_job_age_seconds", {(): self._queue.oldest_queued_age_s()})
        yield _family("foreword_tenant_jobs", self._by_tenant())
        yield _family("foreword_uploads_bytes", {(): self._uploaded_bytes()})
        yield _family("foreword_uploads_cap_bytes", {(): settings.upload_bytes})
        yield from room(settings, settings.files_dir, self._kv_usage())

    def _by_tenant(self) -> Mapping[tuple[str, ...], float]:
        states = ("queued", "running")
        found: dict[tuple[str, ...], float] = {(name, state): 0 for name in self._tenant.names for state in states}
        for lane in self._queue.lanes():
            tenant = self._tenant(lane.tenant)
            for state, number in zip(states, (lane.queued, lane.running), strict=True):
                found[tenant, state] = found.get((tenant, state), 0) + number
        return found


def room(settings: Settings, folder: Path, kv_usage: Mapping[str, int]) -> Iterable[Metric]:
    """What is free of the disk under `folder`, and what is stored of KV, in bytes by tier, against its caps."""
    caps = {"disk": settings.kv_disk_bytes, "host": settings.kv_host_bytes}
    yield _family("foreword_kv_bytes", {(tier,): size for tier, size in kv_usage.items()})
    yield _family("foreword_kv_cap_bytes", {(tier,): caps[tier] for tier in kv_usage})
    yield _family("foreword_disk_free_bytes", {(): shutil.disk_usage(folder).free})
    yield _family("foreword_disk_floor_bytes", {(): settings.disk_floor_bytes})


def _family(name: str, values: Mapping[Any, float]) -> Metric:
    """`values` by their tuple of label values."""
    labels, meaning = STATE[name]
    family = GaugeMetricFamily(name, meaning, labels=labels)
    for label_values, value in values.items():
        family.add_metric(list(label_values), value)
    return family
