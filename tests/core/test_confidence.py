"""Intervals cover the true value as often as they say, and equal those of SciPy."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from specdec_fast.core.confidence import difference_interval, ratio_interval


@pytest.mark.parametrize("count", [2, 3, 6, 16, 17, 40, 400])
def test_intervals_equal_those_of_scipy(count: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    source = random.Random(count)
    ratios = [math.exp(source.gauss(-0.05, 0.1)) for _ in range(count)]
    found, logs = ratio_interval(ratios), np.log(ratios)
    low, high = stats.t.interval(0.95, count - 1, loc=logs.mean(), scale=stats.sem(logs))
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-4)
    assert found.mean == pytest.approx(float(stats.gmean(ratios)))
    others = [source.gauss(1, 0.1) for _ in range(count)]
    apart = np.asarray(ratios) - others
    found = difference_interval(ratios, others)
    want = stats.t.interval(0.95, count - 1, loc=apart.mean(), scale=stats.sem(apart))
    assert (found.low, found.high) == pytest.approx(want, abs=1e-4)


def test_one_measurement_has_no_bounds() -> None:
    assert (ratio_interval([0.5]).low, ratio_interval([0.5]).high) == (0.0, math.inf)
    assert difference_interval([0.5], [0.25]).low == -math.inf
    assert str(ratio_interval([0.97, 0.99, 0.95])) == "0.970 +- 0.051"


def test_bad_measurements() -> None:
    for wrong in ([], [0.9, 0.0]):
        with pytest.raises(ValueError, match="expected at least one number above 0"):
            ratio_interval(wrong)
    with pytest.raises(ValueError, match="got 1 and 2 measurements"):
        difference_interval([1.0], [1.0, 2.0])
