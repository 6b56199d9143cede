"""The server's own figures, from its /metrics."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

TTFT = "foreword_time_to_first_token_seconds"
Series = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Scrape:
    """Samples by name and sorted labels."""

    values: Mapping[Series, float]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series of this name that carry `labels`."""
        wanted = set(labels.items())
        return sum(value for (found, pairs), value in self.values.items() if found == name and wanted <= set(pairs))

    def since(self, earlier: "Scrape") -> "Scrape":
        """What counters and histograms counted in between."""
        return Scrape({series: value - earlier.values.get(series, 0.0) for series, value in self.values.items()})

    def buckets(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """(upper bound, cumulative count) of a histogram, summed over its other labels."""
        wanted, sums = set(labels.items()), dict[float, float]()
        for (found, pairs), value in self.values.items():
            if found == f"{name}_bucket" and wanted <= set(pairs):
                bound = float(dict(pairs)["le"])
                sums[bound] = sums.get(bound, 0.0) + value
        return sorted(sums.items())


def scrape(url: str) -> Scrape:
    """Raises httpx.HTTPError."""
    answer = httpx.get(f"{url}/metrics", timeout=60)
    answer.raise_for_status()
    values: dict[Series, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return Scrape(values)


def bucket_of(buckets: list[tuple[float, float]], share: float) -> tuple[float, float]:
    """Bounds of the bucket in which the quantile `share` (0 to 1) lies; nan where nothing was counted."""
    if not buckets or not buckets[-1][1]:
        return math.nan, math.nan
    lower = 0.0
    for bound, count in buckets:
        if count >= share * buckets[-1][1]:
            return lower, bound
        lower = bound
    raise AssertionError("the last bucket holds all")
