"""Paired statistics over documents: each is its own comparison of two variants, its questions are not independent."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Paired:
    """Mean of the differences, one a document, and the one-sided 95 % upper bound of their mean."""

    mean: float
    upper: float | None  # None with fewer than two documents
    documents: int


def paired(differences: Sequence[float]) -> Paired:
    """Student's t over documents. Where all differences are equal the bound is their mean: look at `documents` too.

    Raises ValueError for no differences.
    """
    if not differences:
        raise ValueError("got no differences, expected at least one")
    values = np.asarray(differences, dtype=np.float64)
    count = len(values)
    upper = None
    if count > 1:
        error = float(values.std(ddof=1)) / math.sqrt(count)
        upper = float(values.mean()) + t_quantile(0.95, count - 1) * error
    return Paired(float(values.mean()), upper, count)


def t_quantile(probability: float, freedom: int) -> float:
    """Of Student's t with `freedom` degrees; `probability` from 0.5 to 0.999."""
    low, high = 0.0, 400.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _t_cdf(value: float, freedom: int) -> float:
    # In the angle atan(t / √freedom) the density is a power of the cosine: smooth, on a bounded range.
    angle = np.linspace(0.0, math.atan(value / math.sqrt(freedom)), 2001)
    density = np.cos(angle) ** (freedom - 1)
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return 0.5 + constant * float(((density[1:] + density[:-1]) / 2 * np.diff(angle)).sum())
