"""Open-loop arrivals: requests come when they come, whether or not the last was answered."""

import random
from collections.abc import Iterator


def poisson(rate_per_s: float, seconds: float, *, seed: int) -> Iterator[float]:
    """Due times in seconds from the start, of a Poisson process: the gaps are exponential and independent."""
    if rate_per_s <= 0:
        raise ValueError(f"a rate above 0 is expected, not {rate_per_s}")
    chance = random.Random(seed)
    due = chance.expovariate(rate_per_s)
    while due < seconds:
        yield due
        due += chance.expovariate(rate_per_s)
