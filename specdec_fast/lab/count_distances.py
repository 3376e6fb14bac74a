"""Distances between counts of sampled tokens and a distribution: a certified bound, and the spread of bars.

Every function takes counts [k] and probabilities [k] (float64, sum 1 within 1e-6) of the same k bins.
Tests: tests/lab/test_statistics.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec_fast.lab.statistics import Counts, Distribution, check_counts, check_dist


def total_variation(p: Distribution, q: Distribution) -> float:
    """Returns the total variation distance: half the sum of absolute differences."""
    return float(0.5 * np.abs(np.asarray(p) - np.asarray(q)).sum())


def certified_distance(counts: Any, dist: Any, confidence: float = 0.999) -> float:
    """Bounds the total variation between the sampler's true distribution and `dist` from above.

    By the triangle inequality, TV(true, dist) <= TV(observed, dist) + TV(true, observed). The last term is bounded
    without knowledge of the true distribution, in two ways; each gets half of the error probability, and the smaller
    bound holds. The first is twice the empirical Rademacher complexity of all sets of bins, which is the sum over bins
    of E|S_n| / 2n for a random walk S_n of the bin's n draws, plus 3 sqrt(ln(2/d) / 2n). The second, smaller for few
    bins, is sqrt(k / 4n) + sqrt(ln(1/d) / 2n).

    Args:
        counts: Observed counts, int64 [k].
        dist: Probabilities, float64 [k].
        confidence: Confidence of the bound.

    Returns:
        The bound; 1 without draws.

    Source:
        Bartlett and Mendelson 2002, theorem 8; McDiarmid 1989.
    """
    dist = check_dist(dist)
    counts = check_counts(counts, dist)
    total = int(counts.sum())
    if total == 0:
        return 1.0
    delta = (1 - confidence) / 2
    walks = float(_mean_walk(counts[counts > 0]).sum()) / total
    by_data = walks + 3 * float(np.sqrt(np.log(2 / delta) / (2 * total)))
    by_count = 0.5 * float(np.sqrt((len(dist) - 1) / total)) + float(np.sqrt(np.log(1 / delta) / (2 * total)))
    return min(1.0, total_variation(counts / total, dist) + min(by_data, by_count))


def _mean_walk(steps: Counts) -> Distribution:
    """Returns E|S_n| of the simple random walk: 2 ceil(n/2) C(n, ceil(n/2)) / 2^n."""
    from scipy.special import gammaln

    n = steps.astype(np.float64)
    half = np.ceil(n / 2)
    return np.asarray(2 * half * np.exp(gammaln(n + 1) - gammaln(half + 1) - gammaln(n - half + 1) - n * np.log(2)))


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviation of (frequency - probability) over a set of bars, and its expected value.

    Attributes:
        bars: Number of bars.
        draws: Number of draws.
        observed: Root of the mean squared difference.
        expected: Root of its expectation, sqrt(mean p (1 - p) / n).
        low: Lower end of the confidence band.
        high: Upper end of the confidence band.
    """

    bars: int
    draws: int
    observed: float
    expected: float
    low: float
    high: float
    confidence: float

    @property
    def inside(self) -> bool:
        """Whether the observed value is inside the confidence band."""
        return bool(self.low <= self.observed <= self.high)


def spread(counts: Any, dist: Any, bars: Any, confidence: float = 0.999, trials: int = 20000, seed: int = 0) -> Spread:
    """Computes `Spread` over a set of bins; its band is simulated from the multinomial distribution.

    The square is a weighted sum of chi-squares of correlated bins, which has no tabulated distribution.

    Args:
        counts: Observed counts, int64 [k].
        dist: Probabilities, float64 [k].
        bars: Bins of the set, int64 [m].
        confidence: Confidence of the band.
        trials: Number of simulated multinomial samples.
        seed: Seed of the simulation.

    Returns:
        The standard deviation with its band.

    Raises:
        ValueError: Without draws or bars.
    """
    dist = check_dist(dist)
    counts = check_counts(counts, dist)
    selected = np.asarray(bars, dtype=np.int64)
    total = int(counts.sum())
    if total == 0 or len(selected) == 0:
        raise ValueError(f"spread: got {total} draws and {len(selected)} bars; expected at least one of each")
    p = dist[selected]
    observed = float(np.sqrt(np.mean((counts[selected] / total - p) ** 2)))
    expected = float(np.sqrt(np.mean(p * (1 - p)) / total))
    rest = max(0.0, 1.0 - float(p.sum()))
    cells = np.append(p, rest)
    sample = np.random.default_rng(seed).multinomial(total, cells / cells.sum(), size=trials)[:, :-1]
    simulated = np.sqrt(np.mean((sample / total - p) ** 2, axis=1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(simulated, [tail, 1 - tail])
    return Spread(len(selected), total, observed, expected, float(low), float(high), confidence)
