"""Three clocks of one first token: the client's, the API's (in each answer) and the worker's (the histogram)."""

import math
from collections.abc import Sequence
from typing import Any

from loadtests.http.samples import Sample
from loadtests.http.scrape import TTFT, Scrape, bucket_of


def compare_clocks(samples: Sequence[Sample], counted: Scrape) -> dict[str, dict[str, Any]]:
    """By cache state: means in seconds and how many each clock saw; `counted` is what the server counted meanwhile.

    A cold observation of the server is of a prefill, from upload complete to the last row's logits; the client's goes
    on until the answer to its question begins. Warm ones are of the same requests on both sides.
    """
    table: dict[str, dict[str, Any]] = {}
    for state in ("cold", "partial", "warm_host", "warm_disk"):
        seen = [s for s in samples if s.cache_state == state and s.ttft_s is not None and s.server_ttft_s is not None]
        count = counted.total(f"{TTFT}_count", cache_state=state)
        if not seen and not count:
            continue
        lower, upper = bucket_of(counted.buckets(TTFT, cache_state=state), 0.5)
        table[state] = {
            "client_count": len(seen),
            "client_mean_s": _mean([s.ttft_s for s in seen if s.ttft_s is not None]),
            "api_mean_s": _mean([s.server_ttft_s for s in seen if s.server_ttft_s is not None]),
            "histogram_count": int(count),
            "histogram_mean_s": round(counted.total(f"{TTFT}_sum", cache_state=state) / count, 4) if count else None,
            "histogram_p50_s": [lower, upper] if math.isfinite(upper) else None,
        }
    return table


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
