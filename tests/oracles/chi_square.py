"""Pearson's test of counts against exact probabilities."""

from __future__ import annotations

from collections.abc import Mapping

from scipy import stats


def p_value(counts: Mapping[tuple[int, ...], int], exact: Mapping[tuple[int, ...], float]) -> float:
    """Returns the probability of counts at least this far from `exact`; cells that expect fewer than five are pooled.

    0 if an outcome of probability zero occurred.
    """
    total = sum(counts.values())
    if any(exact.get(cell, 0.0) == 0.0 for cell, seen in counts.items() if seen):
        return 0.0
    observed, expected, rare_seen, rare_expected = [], [], 0.0, 0.0
    for cell, probability in exact.items():
        if probability * total < 5:
            rare_seen += counts.get(cell, 0)
            rare_expected += probability * total
        else:
            observed.append(counts.get(cell, 0))
            expected.append(probability * total)
    if rare_expected >= 1:
        observed.append(rare_seen)
        expected.append(rare_expected)
    statistic = sum((seen - due) ** 2 / due for seen, due in zip(observed, expected, strict=True))
    return float(stats.chi2.sf(statistic, len(observed) - 1))
