"""Right distributions are accepted as often as they should be, wrong ones rejected, and bounds are bounds."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_fast.lab.count_distances import certified_distance, spread, total_variation
from specdec_fast.lab.statistics import (
    check_dist,
    chi_square,
    draws_needed,
    g_test,
    holm,
    intervals,
    pooled,
    rate_test,
    z_scores,
)


def some_dist(bins: int, seed: int = 1, zeros: int = 0) -> np.ndarray:
    dist = np.random.default_rng(seed).dirichlet(np.full(bins, 0.2))
    if zeros:
        dist[:zeros] = 0
    return dist / dist.sum()


def bent(dist: np.ndarray, strength: float, seed: int = 2) -> np.ndarray:
    """A distribution near another one."""
    found = dist * np.exp(strength * np.random.default_rng(seed).standard_normal(len(dist)))
    return found / found.sum()


@pytest.mark.parametrize("test", [chi_square, g_test])
@pytest.mark.parametrize("bins", [5, 60, 2000])
def test_p_values_of_the_right_distribution_are_uniform(test, bins: int) -> None:
    source, dist = np.random.default_rng(3), some_dist(bins)
    p_values = np.array([test(source.multinomial(5000, dist), dist).p_value for _ in range(600)])
    for share in (0.01, 0.1, 0.5, 0.9):
        # five standard deviations of a binomial, and a little for the chi-square's own approximation
        assert abs((p_values <= share).mean() - share) < 5 * (share * (1 - share) / 600) ** 0.5 + 0.1 * share + 0.01


@pytest.mark.parametrize("test", [chi_square, g_test])
@pytest.mark.parametrize("bins", [5, 60, 2000])
def test_a_wrong_distribution_is_rejected(test, bins: int) -> None:
    source, dist = np.random.default_rng(4), some_dist(bins)
    wrong = bent(dist, 0.3)
    assert test(source.multinomial(50_000, wrong), dist).p_value < 1e-9


def test_an_impossible_draw_is_rejected_at_once() -> None:
    dist = some_dist(50, zeros=5)
    counts = np.random.default_rng(0).multinomial(1000, dist)
    assert chi_square(counts, dist).p_value > 1e-3
    counts[2] += 1
    assert chi_square(counts, dist).p_value == 0.0
    assert chi_square(counts, dist).worst[0][0] == 2


def test_pooling_keeps_every_draw_and_enough_in_every_cell() -> None:
    dist = some_dist(3000)
    counts = np.random.default_rng(5).multinomial(20_000, dist)
    seen, expected, merged = pooled(counts, dist)
    assert merged > 0 and seen.sum() == counts.sum()
    assert expected.sum() == pytest.approx(20_000) and expected.min() >= 5


def test_a_wrong_tail_is_seen_through_the_pool() -> None:
    """Two tokens swap nothing but rare ones lose half their mass: pooled cells must show that."""
    dist = some_dist(4000)
    wrong = dist.copy()
    rare = np.argsort(dist)[:3700]
    wrong[rare] *= 0.5
    wrong[np.argmax(dist)] += 1 - wrong.sum()
    assert wrong[rare].sum() > 0.005
    assert chi_square(np.random.default_rng(6).multinomial(200_000, wrong), dist).p_value < 1e-6


def test_worst_bins_name_the_offenders() -> None:
    dist = np.full(10, 0.1)
    wrong = dist.copy()
    wrong[7], wrong[2] = 0.13, 0.07
    found = chi_square(np.random.default_rng(7).multinomial(20_000, wrong), dist)
    assert {found.worst[0][0], found.worst[1][0]} == {7, 2}
    bin_, seen, due, z = found.worst[0]
    assert due == pytest.approx(2000) and z == pytest.approx((seen - due) / (2000 * 0.9) ** 0.5)
    assert bin_ in (7, 2)


@pytest.mark.parametrize("bins", [3, 40, 1500])
def test_the_certified_distance_holds_and_shrinks(bins: int) -> None:
    source, dist = np.random.default_rng(8), some_dist(bins)
    for strength in (0.0, 0.2):
        wrong = bent(dist, strength) if strength else dist
        true = total_variation(wrong, dist)
        small, large = (
            [certified_distance(source.multinomial(n, wrong), dist) for _ in range(60)] for n in (2000, 200_000)
        )
        assert min(small) >= true and min(large) >= true
        assert np.mean(large) < 0.35 * np.mean(small) + true
    # from so many draws of the right distribution something useful must be certified
    assert certified_distance(source.multinomial(10**6, dist), dist) < 0.05


def test_intervals_cover_as_often_as_they_say() -> None:
    dist, source = np.array([0.5, 0.3, 0.15, 0.05]), np.random.default_rng(9)
    inside = 0
    for _ in range(1000):
        low, high = intervals(source.multinomial(300, dist), confidence=0.95)
        inside += int(((low <= dist) & (dist <= high)).sum())
    assert 0.945 < inside / 4000 < 0.985
    low, high = intervals(np.array([0, 10]))
    assert low[0] == 0 and high[1] == 1 and high[0] < 0.6


def test_z_scores_have_the_binomial_s_scale() -> None:
    dist, source = some_dist(30), np.random.default_rng(10)
    z = np.array([z_scores(source.multinomial(20_000, dist), dist) for _ in range(400)])
    assert abs(z[:, dist > 1e-3].std() - 1) < 0.05
    assert z_scores(np.array([5, 1]), np.array([1.0, 0.0])).tolist() == [-np.inf, np.inf]


def test_the_rate_test_is_two_sided() -> None:
    assert rate_test("a", 500, 1000, 0.5).p_value == pytest.approx(1.0)
    assert rate_test("a", 420, 1000, 0.5).p_value < 1e-6 > rate_test("a", 580, 1000, 0.5).p_value
    assert rate_test("a", 10, 10, 1.0).p_value == 1.0 and rate_test("a", 9, 10, 1.0).p_value == 0.0
    with pytest.raises(ValueError, match="expected 0 <= seen <= total"):
        rate_test("a", 3, 2, 0.5)


def test_the_spread_is_what_the_multinomial_says() -> None:
    dist, source = some_dist(200), np.random.default_rng(11)
    bars = np.argsort(-dist)[:20]
    found = [spread(source.multinomial(10**6, dist), dist, bars, trials=4000) for _ in range(100)]
    squares = np.mean([each.observed**2 for each in found])
    assert squares == pytest.approx(found[0].expected ** 2, rel=0.2)
    assert sum(each.inside for each in found) >= 98
    wrong = spread(source.multinomial(10**6, bent(dist, 0.1)), dist, bars, trials=4000)
    assert not wrong.inside and wrong.observed > wrong.high
    # by hand: two bars of one half
    even = spread(np.array([600, 400]), np.array([0.5, 0.5]), [0, 1], trials=100)
    assert even.observed == pytest.approx(0.1) and even.expected == pytest.approx((0.25 / 1000) ** 0.5)


def test_the_power_is_what_simulation_finds() -> None:
    dist = some_dist(8, seed=13)
    wrong = bent(dist, 0.15)
    needed = int(draws_needed(wrong, dist))
    source = np.random.default_rng(12)

    def power(draws: int) -> float:
        return float(np.mean([chi_square(source.multinomial(draws, wrong), dist).p_value < 1e-3 for _ in range(300)]))

    assert power(needed) > 0.95 and power(needed // 4) < 0.6
    assert draws_needed(dist, dist) == float("inf")
    assert draws_needed(np.array([0.5, 0.5]), np.array([1.0, 0.0])) < 10


def test_holm_keeps_the_error_of_the_family() -> None:
    assert holm([0.5, 1e-9, 0.2]) == [False, True, False]
    assert holm([4e-4, 4e-4]) == [True, True] and holm([6e-4, 6e-4]) == [False, False]
    source = np.random.default_rng(14)
    wrong = sum(any(holm(list(source.random(50)), level=0.05)) for _ in range(2000))
    assert wrong / 2000 < 0.065


@pytest.mark.parametrize(
    ("dist", "words"),
    [
        ([0.5, float("nan")], "NaN or infinite"),
        ([0.5, 0.6], "sums to 1.1"),
        ([1.5, -0.5], "expected probabilities of at least 0"),
        ([], "at least one bin"),
    ],
)
def test_what_is_no_distribution_is_refused(dist: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_dist(dist)


def test_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="one per bin"):
        chi_square(np.array([1, 2, 3]), [0.5, 0.5])
    with pytest.raises(ValueError, match="integers"):
        chi_square(np.array([1.0, 2.0]), [0.5, 0.5])
    with pytest.raises(ValueError, match="at least 0"):
        chi_square(np.array([-1, 2]), [0.5, 0.5])
