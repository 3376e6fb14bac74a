"""Are these counts draws from this distribution? Tests with pooling, intervals, a certified distance, the spread of
bars.

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
    """A distribution as float64 [..., k].

    Raises ValueError for NaN, negative numbers or sums that are not 1 within 1e-6.
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
    """Counts as int64 [k], as many as the distribution has bins. Raises ValueError."""
    found = np.asarray(counts)
    if found.shape != dist.shape or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"{what}: got {found.dtype} {found.shape}; expected integers {dist.shape}, one per bin")
    if (found < 0).any():
        raise ValueError(f"{what}: got {found.min()}; expected counts of at least 0")
    return found.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Test:
    """Outcome of one test. p_value: chance, if the distribution holds, of counts at least this far from it.

    worst: (bin, seen, expected, z) of the bins that stray most, the worst first; pooled: bins that share one cell.
    """

    name: str
    statistic: float
    degrees: int
    p_value: float
    draws: int
    pooled: int
    worst: tuple[tuple[int, int, float, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def pooled(counts: Counts, dist: Distribution, least: float = MIN_EXPECTED) -> tuple[Distribution, Distribution, int]:
    """(seen, expected, how many bins were pooled): bins expecting fewer than `least` share cells of about that size.

    The rare bins are pooled in order of probability, a cell being closed when it expects enough; what is left over
    joins the last cell. Which bins share a cell depends on the distribution only, never on the counts.
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
            if shared[0] < least and len(common):  # too little even together: the least common bin takes them
                expected_cells[0][-1] += shared[0]
                seen_cells[0][-1] += seen[0]
            else:
                seen_cells.append(seen)
                expected_cells.append(shared)
    return np.concatenate(seen_cells), np.concatenate(expected_cells), len(rare)


def worst_bins(counts: Counts, dist: Distribution, how_many: int = 8) -> tuple[tuple[int, int, float, float], ...]:
    """The bins whose counts stray most from the distribution, by z-score: (bin, seen, expected, z)."""
    z = z_scores(counts, dist)
    order = np.argsort(-np.abs(z), kind="stable")[:how_many]
    total = int(counts.sum())
    return tuple((int(bin_), int(counts[bin_]), float(dist[bin_] * total), float(z[bin_])) for bin_ in order)


def chi_square(counts: Any, dist: Any, least: float = MIN_EXPECTED) -> Test:
    """Pearson's goodness-of-fit test. A draw in a bin of probability 0 gives p_value 0.

    Raises ValueError for counts or distributions that are none.
    """
    return _goodness("chi-square", counts, dist, least, 1.0)


def g_test(counts: Any, dist: Any, least: float = MIN_EXPECTED) -> Test:
    """Likelihood-ratio test, G = 2 sum seen ln(seen / expected), on the same pooled cells.

    With Williams's correction (1976): plain G is too large where cells expect few draws, and would reject too often.
    """
    return _goodness("G", counts, dist, least, 0.0)


def _goodness(name: str, counts: Any, dist: Any, least: float, power: float) -> Test:
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
    """Exact two-sided binomial test of `seen` successes in `total` trials of probability `chance`."""
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
    """(seen - expected) / standard deviation per bin; infinite where something impossible was seen (or missed)."""
    total = int(counts.sum())
    expected, spread = dist * total, np.sqrt(dist * (1 - dist) * total)
    difference = counts - expected
    sure = np.where(np.abs(difference) > 1e-9 * max(total, 1), np.copysign(np.inf, difference), 0.0)
    return np.divide(difference, spread, out=sure, where=spread > 0)


def intervals(counts: Counts, confidence: float = 0.999) -> tuple[Distribution, Distribution]:
    """Exact (Clopper and Pearson 1934) intervals of every bin's probability: (low [k], high [k])."""
    from scipy.stats import beta

    total, tail = int(counts.sum()), (1 - confidence) / 2
    low = np.where(counts > 0, beta.ppf(tail, np.maximum(counts, 1), total - counts + 1), 0.0)
    high = np.where(counts < total, beta.ppf(1 - tail, counts + 1, np.maximum(total - counts, 1)), 1.0)
    return low, high


def total_variation(p: Distribution, q: Distribution) -> float:
    """Half the sum of absolute differences."""
    return float(0.5 * np.abs(np.asarray(p) - np.asarray(q)).sum())


def certified_distance(counts: Any, dist: Any, confidence: float = 0.999) -> float:
    """An upper bound of the total variation between the sampler's true distribution and `dist`, at this confidence.

    TV(true, distribution) <= TV(seen, distribution) + TV(true, seen), and the last term is bounded without knowing
    the true distribution: by its expectation, at most twice the empirical Rademacher complexity of all sets of bins
    (Bartlett and Mendelson 2002, theorem 8; for sets, the complexity is the sum over bins of E|S_n| / 2n, S_n a
    random walk of the bin's n draws), plus 3 sqrt(ln(2/d) / 2n) (McDiarmid). With few bins sqrt(k / 4n) +
    sqrt(ln(1/d) / 2n) is smaller; each gets half of the error probability and the smaller one holds.
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
    """E|S_n| of the simple random walk: 2 ceil(n/2) C(n, ceil(n/2)) / 2^n."""
    from scipy.special import gammaln

    n = steps.astype(np.float64)
    half = np.ceil(n / 2)
    return np.asarray(2 * half * np.exp(gammaln(n + 1) - gammaln(half + 1) - gammaln(n - half + 1) - n * np.log(2)))


@dataclass(frozen=True, slots=True)
class Spread:
    """The standard deviation of (frequency - probability) over a stated set of bars, beside what it should be.

    observed: root of the mean squared difference; expected: root of its expectation, sqrt(mean p (1 - p) / n);
    low, high: the band that holds it with the given confidence.
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
        return bool(self.low <= self.observed <= self.high)


def spread(counts: Any, dist: Any, bars: Any, confidence: float = 0.999, trials: int = 20000, seed: int = 0) -> Spread:
    """`Spread` over the bins `bars` (int [m]); the band is simulated from the multinomial itself.

    The square is a weighted sum of chi-squares of correlated bins, so `trials` multinomial samples of the bars (and one
    bin for the rest) stand for its distribution; no table has it.
    """
    dist = check_dist(dist)
    counts = check_counts(counts, dist)
    chosen = np.asarray(bars, dtype=np.int64)
    total = int(counts.sum())
    if total == 0 or len(chosen) == 0:
        raise ValueError(f"spread: got {total} draws and {len(chosen)} bars; expected at least one of each")
    p = dist[chosen]
    observed = float(np.sqrt(np.mean((counts[chosen] / total - p) ** 2)))
    expected = float(np.sqrt(np.mean(p * (1 - p)) / total))
    rest = max(0.0, 1.0 - float(p.sum()))
    cells = np.append(p, rest)
    sample = np.random.default_rng(seed).multinomial(total, cells / cells.sum(), size=trials)[:, :-1]
    simulated = np.sqrt(np.mean((sample / total - p) ** 2, axis=1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(simulated, [tail, 1 - tail])
    return Spread(len(chosen), total, observed, expected, float(low), float(high), confidence)


def draws_needed(true: Any, dist: Any, level: float = 1e-3, power: float = 0.99) -> float:
    """How many draws a chi-square test needs to reject `dist` with chance `power` when `true` is drawn from.

    Noncentral chi-square with noncentrality n sum (true - distribution)^2 / distribution; infinite when they are
    equal, 1 / (mass that must not be there) scaled by the power where `dist` has zeros.
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
    """Which hypotheses are rejected when the chance of any false rejection is kept below `level` (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda at: p_values[at])
    rejected = [False] * len(p_values)
    for rank, at in enumerate(order):
        if p_values[at] > level / (len(p_values) - rank):
            break
        rejected[at] = True
    return rejected
