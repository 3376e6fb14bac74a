"""Confidence intervals of repeated measurements, by which tuners compare a gain with the noise.

Tests: tests/core/test_confidence.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom."""
_NORMAL_975 = 1.959964


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} +- {max(self.high - self.mean, self.mean - self.low):.3f}"


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """Computes the geometric mean of positive ratios and its interval, by Student's t of their logarithms.

    Args:
        ratios: Independent measurements of one ratio.

    Returns:
        The interval; without bounds (0 and infinity) for a single measurement.

    Raises:
        ValueError: If there are no ratios, or one is not above 0.
    """
    if not ratios or min(ratios) <= 0:
        raise ValueError(f"ratios: got {list(ratios)[:5]}; expected at least one number above 0")
    logs = [math.log(ratio) for ratio in ratios]
    mean = fmean(logs)
    if len(logs) == 1:
        return Interval(math.exp(mean), 0.0, math.inf)
    half = _quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def difference_interval(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Computes the mean of `first` minus `second` and its interval, from paired measurements.

    Args:
        first: Measurements.
        second: Measurements of the same places.

    Returns:
        The interval; without bounds for a single pair.

    Raises:
        ValueError: If the lengths differ, or there are no measurements.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"pairs: got {len(first)} and {len(second)} measurements; expected the same number of both")
    apart = [one - other for one, other in zip(first, second)]
    mean = fmean(apart)
    if len(apart) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = _quantile(len(apart) - 1) * stdev(apart) / math.sqrt(len(apart))
    return Interval(mean, mean - half, mean + half)


def _quantile(degrees: int) -> float:
    """Returns the 97.5 % quantile of Student's t; beyond the table by its expansion around the normal one."""
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = _NORMAL_975
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
