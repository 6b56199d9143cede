"""One line a request of a scenario, and the figures that a report makes of them."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LENGTHS = (512, 1024, 2048, 4096, 8192, 32_768, 131_072, 524_288, 1_048_576)


@dataclass(frozen=True)
class Sample:
    """`arrived_at` and `ended_at` in seconds of one monotonic clock; `ttft_s` from arrival, of a cold one from the
    end of its upload. `code`: ok, left, or an error's. `late_s`: how long behind its time the client sent it.
    """

    scenario: str
    step: str
    tenant: str
    arrived_at: float
    ended_at: float
    code: str
    num_tokens: int = 0
    ttft_s: float | None = None
    cache_state: str | None = None
    server_ttft_s: float | None = None
    right: bool | None = None
    late_s: float = 0.0


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    path.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in samples), encoding="utf-8")


def read_samples(path: Path) -> list[Sample]:
    return [Sample(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def length_class(num_tokens: int) -> str:
    """The least of LENGTHS that it fits in."""
    bound = next((length for length in LENGTHS if num_tokens <= length), None)
    return "above 1M" if bound is None else f"≤ {bound // 1024}K" if bound >= 1024 else f"≤ {bound}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1] of all don't exceed; nan of none."""
    if not 0 < share <= 1:
        raise ValueError(f"a share above 0 and up to 1 is expected, not {share}")
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else math.nan


def spread(values: Sequence[float]) -> dict[str, float]:
    mean = sum(values) / len(values) if values else math.nan
    figures = {f"p{share}": round(percentile(values, share / 100), 4) for share in (50, 95, 99)}
    return {"count": len(values), **figures, "mean": round(mean, 4)}


def summarize(samples: Sequence[Sample], *, objectives_s: dict[str, float]) -> dict[str, Any]:
    """`objectives_s`: the longest good TTFT of warm and of cold (also partial) answers."""
    by_state: dict[str, dict[str, list[float]]] = {}
    by_tenant: dict[str, list[float]] = {}
    good = 0
    for sample in sorted(samples, key=lambda sample: sample.num_tokens):
        if sample.code != "ok" or sample.ttft_s is None:
            continue
        state = sample.cache_state or "unknown"
        by_state.setdefault(state, {}).setdefault(length_class(sample.num_tokens), []).append(sample.ttft_s)
        by_tenant.setdefault(sample.tenant, []).append(sample.ttft_s)
        good += sample.ttft_s <= objectives_s["warm" if state.startswith("warm") else "cold"]
    seconds = max((s.ended_at for s in samples), default=0.0) - min((s.arrived_at for s in samples), default=0.0)
    codes = Counter(sample.code for sample in samples)
    judged = [sample.right for sample in samples if sample.right is not None]
    return {
        "arrivals": len(samples),
        "completed": codes["ok"],
        "left": codes["left"],
        "errors": {code: count for code, count in sorted(codes.items()) if code not in ("ok", "left")},
        "seconds": round(seconds, 2),
        "ttft_s": {
            state: {
                "all": spread([value for values in lengths.values() for value in values]),
                **{length: spread(values) for length, values in lengths.items()},
            }
            for state, lengths in sorted(by_state.items())
        },
        "tenants": {tenant: spread(values) for tenant, values in sorted(by_tenant.items())},
        "objectives_s": objectives_s,
        "goodput_per_s": round(good / seconds, 4) if seconds else 0.0,
        "good_share": round(good / len(samples), 4) if samples else 0.0,
        "right_share": round(sum(judged) / len(judged), 4) if judged else None,
        "latest_start_s": round(max((sample.late_s for sample in samples), default=0.0), 4),
    }
