"""Right laws are accepted as often as they should be, wrong ones rejected, and bounds are bounds."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_fast.lab.statistics import (
    certified_distance,
    check_law,
    chi_square,
    draws_needed,
    g_test,
    holm,
    intervals,
    pooled,
    rate_test,
    spread,
    total_variation,
    z_scores,
)


def some_law(bins: int, seed: int = 1, zeros: int = 0) -> np.ndarray:
    law = np.random.default_rng(seed).dirichlet(np.full(bins, 0.2))
    if zeros:
        law[:zeros] = 0
    return law / law.sum()


def bent(law: np.ndarray, strength: float, seed: int = 2) -> np.ndarray:
    """A law near another one."""
    found = law * np.exp(strength * np.random.default_rng(seed).standard_normal(len(law)))
    return found / found.sum()


@pytest.mark.parametrize("test", [chi_square, g_test])
@pytest.mark.parametrize("bins", [5, 60, 2000])
def test_p_values_of_the_right_law_are_uniform(test, bins: int) -> None:
    source, law = np.random.default_rng(3), some_law(bins)
    p_values = np.array([test(source.multinomial(5000, law), law).p_value for _ in range(600)])
    for share in (0.01, 0.1, 0.5, 0.9):
        # five standard deviations of a binomial, and a little for the chi-square's own approximation
        assert abs((p_values <= share).mean() - share) < 5 * (share * (1 - share) / 600) ** 0.5 + 0.1 * share + 0.01


@pytest.mark.parametrize("test", [chi_square, g_test])
@pytest.mark.parametrize("bins", [5, 60, 2000])
def test_a_wrong_law_is_rejected(test, bins: int) -> None:
    source, law = np.random.default_rng(4), some_law(bins)
    wrong = bent(law, 0.3)
    assert test(source.multinomial(50_000, wrong), law).p_value < 1e-9


def test_an_impossible_draw_is_rejected_at_once() -> None:
    law = some_law(50, zeros=5)
    counts = np.random.default_rng(0).multinomial(1000, law)
    assert chi_square(counts, law).p_value > 1e-3
    counts[2] += 1
    assert chi_square(counts, law).p_value == 0.0
    assert chi_square(counts, law).worst[0][0] == 2


def test_pooling_keeps_every_draw_and_enough_in_every_cell() -> None:
    law = some_law(3000)
    counts = np.random.default_rng(5).multinomial(20_000, law)
    seen, expected, merged = pooled(counts, law)
    assert merged > 0 and seen.sum() == counts.sum()
    assert expected.sum() == pytest.approx(20_000) and expected.min() >= 5


def test_a_wrong_tail_is_seen_through_the_pool() -> None:
    """Two tokens swap nothing but rare ones lose half their mass: pooled cells must show that."""
    law = some_law(4000)
    wrong = law.copy()
    rare = np.argsort(law)[:3700]
    wrong[rare] *= 0.5
    wrong[np.argmax(law)] += 1 - wrong.sum()
    assert wrong[rare].sum() > 0.005
    assert chi_square(np.random.default_rng(6).multinomial(200_000, wrong), law).p_value < 1e-6


def test_worst_bins_name_the_offenders() -> None:
    law = np.full(10, 0.1)
    wrong = law.copy()
    wrong[7], wrong[2] = 0.13, 0.07
    found = chi_square(np.random.default_rng(7).multinomial(20_000, wrong), law)
    assert {found.worst[0][0], found.worst[1][0]} == {7, 2}
    bin_, seen, due, z = found.worst[0]
    assert due == pytest.approx(2000) and z == pytest.approx((seen - due) / (2000 * 0.9) ** 0.5)
    assert bin_ in (7, 2)


@pytest.mark.parametrize("bins", [3, 40, 1500])
def test_the_certified_distance_holds_and_shrinks(bins: int) -> None:
    source, law = np.random.default_rng(8), some_law(bins)
    for strength in (0.0, 0.2):
        wrong = bent(law, strength) if strength else law
        true = total_variation(wrong, law)
        small, large = (
            [certified_distance(source.multinomial(n, wrong), law) for _ in range(60)] for n in (2000, 200_000)
        )
        assert min(small) >= true and min(large) >= true
        assert np.mean(large) < 0.35 * np.mean(small) + true
    # from so many draws of the right law something useful must be certified
    assert certified_distance(source.multinomial(10**6, law), law) < 0.05


def test_intervals_cover_as_often_as_they_say() -> None:
    law, source = np.array([0.5, 0.3, 0.15, 0.05]), np.random.default_rng(9)
    inside = 0
    for _ in range(1000):
        low, high = intervals(source.multinomial(300, law), confidence=0.95)
        inside += int(((low <= law) & (law <= high)).sum())
    assert 0.945 < inside / 4000 < 0.985
    low, high = intervals(np.array([0, 10]))
    assert low[0] == 0 and high[1] == 1 and high[0] < 0.6


def test_z_scores_have_the_binomial_s_scale() -> None:
    law, source = some_law(30), np.random.default_rng(10)
    z = np.array([z_scores(source.multinomial(20_000, law), law) for _ in range(400)])
    assert abs(z[:, law > 1e-3].std() - 1) < 0.05
    assert z_scores(np.array([5, 1]), np.array([1.0, 0.0])).tolist() == [-np.inf, np.inf]


def test_the_rate_test_is_two_sided() -> None:
    assert rate_test("a", 500, 1000, 0.5).p_value == pytest.approx(1.0)
    assert rate_test("a", 420, 1000, 0.5).p_value < 1e-6 > rate_test("a", 580, 1000, 0.5).p_value
    assert rate_test("a", 10, 10, 1.0).p_value == 1.0 and rate_test("a", 9, 10, 1.0).p_value == 0.0
    with pytest.raises(ValueError, match="expected 0 <= seen <= total"):
        rate_test("a", 3, 2, 0.5)


def test_the_spread_is_what_the_multinomial_says() -> None:
    law, source = some_law(200), np.random.default_rng(11)
    bars = np.argsort(-law)[:20]
    found = [spread(source.multinomial(10**6, law), law, bars, trials=4000) for _ in range(100)]
    squares = np.mean([each.observed**2 for each in found])
    assert squares == pytest.approx(found[0].expected ** 2, rel=0.2)
    assert sum(each.inside for each in found) >= 98
    wrong = spread(source.multinomial(10**6, bent(law, 0.1)), law, bars, trials=4000)
    assert not wrong.inside and wrong.observed > wrong.high
    # by hand: two bars of one half
    even = spread(np.array([600, 400]), np.array([0.5, 0.5]), [0, 1], trials=100)
    assert even.observed == pytest.approx(0.1) and even.expected == pytest.approx((0.25 / 1000) ** 0.5)


def test_the_power_is_what_simulation_finds() -> None:
    law = some_law(8, seed=13)
    wrong = bent(law, 0.15)
    needed = int(draws_needed(wrong, law))
    source = np.random.default_rng(12)

    def power(draws: int) -> float:
        return float(np.mean([chi_square(source.multinomial(draws, wrong), law).p_value < 1e-3 for _ in range(300)]))

    assert power(needed) > 0.95 and power(needed // 4) < 0.6
    assert draws_needed(law, law) == float("inf")
    assert draws_needed(np.array([0.5, 0.5]), np.array([1.0, 0.0])) < 10


def test_holm_keeps_the_error_of_the_family() -> None:
    assert holm([0.5, 1e-9, 0.2]) == [False, True, False]
    assert holm([4e-4, 4e-4]) == [True, True] and holm([6e-4, 6e-4]) == [False, False]
    source = np.random.default_rng(14)
    wrong = sum(any(holm(list(source.random(50)), level=0.05)) for _ in range(2000))
    assert wrong / 2000 < 0.065


@pytest.mark.parametrize(
    ("law", "words"),
    [
        ([0.5, float("nan")], "NaN or infinite"),
        ([0.5, 0.6], "sums to 1.1"),
        ([1.5, -0.5], "expected probabilities of at least 0"),
        ([], "at least one bin"),
    ],
)
def test_what_is_no_law_is_refused(law: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_law(law)


def test_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="one per bin"):
        chi_square(np.array([1, 2, 3]), [0.5, 0.5])
    with pytest.raises(ValueError, match="integers"):
        chi_square(np.array([1.0, 2.0]), [0.5, 0.5])
    with pytest.raises(ValueError, match="at least 0"):
        chi_square(np.array([-1, 2]), [0.5, 0.5])
