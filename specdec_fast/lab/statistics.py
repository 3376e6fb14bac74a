"""Goodness-of-fit tests and intervals for counts of sampled tokens.

Every function takes counts [k] and probabilities [k] (float64, sum 1 within 1e-6) of the same k bins.
Tests: tests/lab/test_statistics.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Distribution = NDArray[np.float64]

MIN_EXPECTED = 5.0
"""Bins that expect fewer draws are pooled (Cochran 1954)."""
Z_999 = 3.2905267314919255
"""Half-width of the 99.9% interval of a standard normal variable."""


def check_dist(dist: Any, what: str = "dist") -> Distribution:
    """Converts a distribution to float64 [..., k].

    Args:
        dist: Probabilities, [..., k].
        what: Name of the distribution, for messages.

    Returns:
        The distribution, divided by its sum.

    Raises:
        ValueError: If it has NaN or negative numbers, or a sum that is not 1 within 1e-6.
    """
    found = np.asarray(dist, dtype=np.float64)
    if found.ndim < 1 or found.shape[-1] < 1:
        raise ValueError(f"{what}: got shape {found.shape}; expected [..., V] with at least one bin")
    if not np.isfinite(found).all():
        raise ValueError(f"{what}: got NaN or infinite probabilities; expected finite numbers; pass logits as logits")
    if (found < 0).any():
        raise ValueError(f"{what}: got {found.min()}; expected probabilities of at least 0")
    total = found.sum(-1)
    worst = np.abs(total - 1).max()
    if worst > 1e-6:
        row = int(np.abs(np.atleast_1d(total) - 1).argmax())
        raise ValueError(
            f"{what}: row {row} sums to {np.atleast_1d(total)[row]:.9g}; expected 1 within 1e-6; normalise it, or pass "
            "logits"
        )
    return np.asarray(found / total[..., None])


def check_counts(counts: Any, dist: Distribution, what: str = "counts") -> Counts:
    """Converts counts to int64 [k].

    Args:
        counts: Counts, integers [k].
        dist: The distribution that they belong to, [k].
        what: Name of the counts, for messages.

    Returns:
        The counts.

    Raises:
        ValueError: Unless they are one non-negative integer per bin of the distribution.
    """
    found = np.asarray(counts)
    if found.shape != dist.shape or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"{what}: got {found.dtype} {found.shape}; expected integers {dist.shape}, one per bin")
    if (found < 0).any():
        raise ValueError(f"{what}: got {found.min()}; expected counts of at least 0")
    return found.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Test:
    """Outcome of one test.

    Attributes:
        name: Name of the test.
        statistic: Value of the test statistic.
        degrees: Degrees of freedom.
        p_value: Probability of counts at least this far from the distribution, if the distribution holds.
        draws: Number of draws.
        pooled: Number of bins that share a cell.
        worst: (bin, observed, expected, z) of the bins that deviate most, the worst first.
    """

    name: str
    statistic: float
    degrees: int
    p_value: float
    draws: int
    pooled: int
    worst: tuple[tuple[int, int, float, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self)


def pooled(counts: Counts, dist: Distribution, least: float = MIN_EXPECTED) -> tuple[Distribution, Distribution, int]:
    """Pools rare bins into cells that expect at least `least` draws.

    Rare bins are pooled in order of probability, and the remainder joins the last cell. The cells depend on the
    distribution only, never on the counts.

    Args:
        counts: Observed counts, int64 [k].
        dist: Probabilities, float64 [k].
        least: Smallest expected number of draws of a bin that is not pooled.

    Returns:
        Observed counts by cell, expected counts by cell, and the number of pooled bins.
    """
    total = int(counts.sum())
    expected = dist * total
    order = np.argsort(-dist, kind="stable")
    rare = order[expected[order] < least]
    common = order[expected[order] >= least]
    seen_cells: list[Distribution] = [counts[common].astype(np.float64)]
    expected_cells: list[Distribution] = [expected[common]]
    if len(rare):
        sums = np.cumsum(expected[rare])
        cell = np.minimum((sums / least).astype(np.int64), int(sums[-1] / least))
        shared: Distribution = np.bincount(cell, weights=expected[rare]).astype(np.float64)
        seen: Distribution = np.bincount(cell, weights=counts[rare].astype(np.float64)).astype(np.float64)
        full = shared >= least
        if full.any():
            last = int(np.nonzero(full)[0][-1])
            shared[last] += shared[~full].sum()
            seen[last] += seen[~full].sum()
            shared, seen = shared[full], seen[full]
        else:
            shared, seen = np.array([shared.sum()]), np.array([seen.sum()])
        if shared.sum() > 0 or seen.sum() > 0:
            if shared[0] < least and len(common):  # too few even together: the least common bin takes them
                expected_cells[0][-1] += shared[0]
                seen_cells[0][-1] += seen[0]
            else:
                seen_cells.append(seen)
                expected_cells.append(shared)
    return np.concatenate(seen_cells), np.concatenate(expected_cells), len(rare)


def worst_bins(counts: Counts, dist: Distribution, how_many: int = 8) -> tuple[tuple[int, int, float, float], ...]:
    """Returns (bin, observed, expected, z) of the bins that deviate most from the distribution, by z-score."""
    z = z_scores(counts, dist)
    order = np.argsort(-np.abs(z), kind="stable")[:how_many]
    total = int(counts.sum())
    return tuple((int(bin_), int(counts[bin_]), float(dist[bin_] * total), float(z[bin_])) for bin_ in order)


def chi_square(counts: Any, dist: Any, least: float = MIN_EXPECTED) -> Test:
    """Performs Pearson's goodness-of-fit test.

    A draw in a bin of probability 0 gives a p-value of 0.

    Args:
        counts: Observed counts, int64 [k].
        dist: Probabilities, float64 [k].
        least: As in `pooled`.

    Returns:
        The outcome.

    Raises:
        ValueError: If counts or distribution are invalid.
    """
    return _goodness("chi-square", counts, dist, least, 1.0)


def g_test(counts: Any, dist: Any, least: float = MIN_EXPECTED) -> Test:
    """Performs a likelihood-ratio test, G = 2 sum observed ln(observed / expected), on the same cells.

    Williams's correction keeps G from rejecting too often where cells expect few draws.

    Args:
        counts: Observed counts, int64 [k].
        dist: Probabilities, float64 [k].
        least: As in `pooled`.

    Returns:
        The outcome.

    Source:
        Williams 1976.
    """
    return _goodness("G", counts, dist, least, 0.0)


def _goodness(name: str, counts: Any, dist: Any, least: float, power: float) -> Test:
    """Power-divergence test: chi-square for power 1, G for power 0."""
    from scipy.stats import chi2, power_divergence

    dist = check_dist(dist)
    counts = check_counts(counts, dist)
    total = int(counts.sum())
    worst = worst_bins(counts, dist)
    impossible = (dist == 0) & (counts > 0)
    if impossible.any():
        return Test(name, float("inf"), len(dist) - 1, 0.0, total, 0, worst)
    seen, expected, merged = pooled(counts, dist, least)
    degrees = len(seen) - 1
    if degrees < 1 or total == 0:
        return Test(name, 0.0, 0, 1.0, total, merged, worst)
    expected = expected * (seen.sum() / expected.sum())
    statistic = float(power_divergence(seen, expected, lambda_=power).statistic)
    if power == 0.0:
        statistic /= 1 + ((total / expected).sum() - 1) / (6 * total * degrees)
    return Test(name, statistic, degrees, float(chi2.sf(statistic, degrees)), total, merged, worst)


def rate_test(name: str, seen: int, total: int, chance: float) -> Test:
    """Performs an exact two-sided binomial test.

    Args:
        name: Name of the test.
        seen: Number of successes.
        total: Number of trials.
        chance: Probability of a success under the hypothesis.

    Returns:
        The outcome.

    Raises:
        ValueError: If the numbers are inconsistent.
    """
    from scipy.stats import binomtest

    if not 0 <= chance <= 1 or not 0 <= seen <= total:
        raise ValueError(f"rate_test {name}: got {seen} of {total} at {chance}; expected 0 <= seen <= total, a chance")
    expected = total * chance
    spread = (expected * (1 - chance)) ** 0.5
    z = (seen - expected) / spread if spread else (0.0 if seen == expected else float("inf"))
    if chance in (0.0, 1.0):
        p_value = 1.0 if seen == expected else 0.0
    else:
        p_value = 1.0 if total == 0 else float(binomtest(seen, total, chance).pvalue)
    return Test(name, z, 1, p_value, total, 0, ((1, seen, expected, z),))


def z_scores(counts: Counts, dist: Distribution) -> Distribution:
    """Returns (observed - expected) / standard deviation by bin; infinite for impossible counts."""
    total = int(counts.sum())
    expected, spread = dist * total, np.sqrt(dist * (1 - dist) * total)
    difference = counts - expected
    sure = np.where(np.abs(difference) > 1e-9 * max(total, 1), np.copysign(np.inf, difference), 0.0)
    return np.divide(difference, spread, out=sure, where=spread > 0)


def intervals(counts: Counts, confidence: float = 0.999) -> tuple[Distribution, Distribution]:
    """Returns exact confidence intervals of every bin's probability.

    Args:
        counts: Observed counts, int64 [k].
        confidence: Confidence of each interval.

    Returns:
        Lower and upper bounds, float64 [k] each.

    Source:
        Clopper and Pearson 1934.
    """
    from scipy.stats import beta

    total, tail = int(counts.sum()), (1 - confidence) / 2
    low = np.where(counts > 0, beta.ppf(tail, np.maximum(counts, 1), total - counts + 1), 0.0)
    high = np.where(counts < total, beta.ppf(1 - tail, counts + 1, np.maximum(total - counts, 1)), 1.0)
    return low, high


def draws_needed(true: Any, dist: Any, level: float = 1e-3, power: float = 0.99) -> float:
    """Returns the number of draws that a chi-square test needs to reject `dist` when samples follow `true`.

    The statistic is noncentral chi-square with noncentrality n sum (true - dist)^2 / dist. The number is infinite
    if the two are equal. Where `dist` has zeros, it follows from the mass of `true` there.

    Args:
        true: Distribution of the samples, float64 [k].
        dist: Distribution under test, float64 [k].
        level: Level of the test.
        power: Probability of a rejection.
    """
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    true, dist = check_dist(true, "true distribution"), check_dist(dist)
    outside = float(true[dist == 0].sum())
    needed = float(np.log(1 - power) / np.log1p(-outside)) if 0 < outside < 1 else (1.0 if outside else float("inf"))
    kept = dist > 0
    effect = float((((true - dist)[kept]) ** 2 / dist[kept]).sum())
    degrees = int(kept.sum()) - 1
    if effect > 1e-24 and degrees > 0:
        limit = float(chi2.isf(level, degrees))
        wanted = brentq(lambda shift: ncx2.sf(limit, degrees, shift) - power, 1e-6, 1e6)
        needed = min(needed, max(1.0, wanted / effect))
    return needed


def holm(p_values: list[float], level: float = 1e-3) -> list[bool]:
    """Applies Holm's correction, which keeps the probability of any false rejection below `level`.

    Returns:
        Whether each hypothesis is rejected.

    Source:
        Holm 1979.
    """
    order = sorted(range(len(p_values)), key=lambda at: p_values[at])
    rejected = [False] * len(p_values)
    for rank, at in enumerate(order):
        if p_values[at] > level / (len(p_values) - rank):
            break
        rejected[at] = True
    return rejected
