"""A robust slope, so that one collection or one burst decides nothing."""

from collections.abc import Sequence

import numpy as np


def theil_sen(x: Sequence[float], y: Sequence[float]) -> float:
    """Median of the slopes between all pairs of points with different x (Sen 1968), in y per x; 0 without any."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(xs) != len(ys):
        raise ValueError(f"{len(xs)} values of x, {len(ys)} of y: equally many are expected")
    first, second = np.triu_indices(len(xs), k=1)
    run = xs[second] - xs[first]
    apart = run != 0
    if not apart.any():
        return 0.0
    return float(np.median((ys[second] - ys[first])[apart] / run[apart]))


def growth_share(x: Sequence[float], y: Sequence[float]) -> float:
    """How much y grows along its robust line from the first x to the last, as a share of its median."""
    middle = float(np.median(y)) if len(y) else 0.0
    return theil_sen(x, y) * (x[-1] - x[0]) / middle if middle else 0.0
