"""Seconds of target passes are measured on a free row, and serve as a prior of later measurements."""

from __future__ import annotations

import pytest
from oracles.automaton import AutomatonTarget, random_logits

from specdec_fast.adaptive import pass_times
from specdec_fast.adaptive.budget import Goodput
from specdec_fast.adaptive.cost_model import DraftOutcome, TimeTable
from specdec_fast.adaptive.pass_times import measure_pass_times
from specdec_fast.core.draft import Draft


def target(**shape: int) -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, 8, seed=2), **shape)


def test_passes_are_measured_and_the_cache_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = target(), []
    score = model.score
    model.score = lambda draft, plan, *more: (passes.append(draft.num_nodes), score(draft, plan, *more))[1]  # type: ignore[method-assign]
    monkeypatch.setattr(pass_times, "SECONDS", 0.0)
    times = measure_pass_times(model, (1, 4, 9), repeats=3)
    assert times is not None and times.keys == [1, 4, 9] and all(times.seconds[size] > 0 for size in times.keys)
    assert passes == [9, 4, 1, *[1, 4, 9] * 3], "the first passes warm up"
    assert model.cache.pages.num_used == 0 and model.cache.lengths.tolist() == [0] * model.cache.max_rows


def test_quick_passes_are_repeated_until_their_fastest_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last repetition is not slow, as on a machine that was busy before."""
    seconds = iter([1.0] * 3 + [0.004] * 3 * (pass_times.MOST_REPEATS - 1) + [0.001, 0.002, 0.003])
    now, model = [0.0], target()
    monkeypatch.setattr(pass_times, "perf_counter", lambda: now[0])
    score = model.score

    def slow(*arguments: object) -> object:
        now[0] += next(seconds)
        return score(*arguments)  # type: ignore[arg-type]

    model.score = slow  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(pass_times, "SECONDS", 0.2)
    times = measure_pass_times(model, (1, 4, 9))
    assert times is not None and times.seconds == pytest.approx({1: 0.001, 4: 0.002, 9: 0.003})
    assert next(seconds, None) is None


def test_long_passes_are_repeated_no_more_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    now, model, passes = [0.0], target(), []
    monkeypatch.setattr(pass_times, "perf_counter", lambda: now[0])
    score = model.score

    def slow(draft: Draft, *arguments: object) -> object:
        now[0] += 1.0
        passes.append(draft.num_nodes)
        return score(draft, *arguments)  # type: ignore[arg-type]

    model.score = slow  # type: ignore[method-assign, assignment]
    assert measure_pass_times(model, (1, 4), repeats=2) is not None
    assert passes == [4, 1, *[1, 4] * 2]


def test_numbers_are_cut_to_the_space_of_the_cache() -> None:
    model = target()
    most = min(model.cache.max_length, model.cache.pages.num_free * model.cache.page_size)
    times = measure_pass_times(model, (1, 2, most + 1, most + 9))
    assert times is not None and times.keys == [1, 2, most]


def test_a_cache_in_use_is_left_alone() -> None:
    model = target()
    model.cache.reserve(0, 4)
    assert measure_pass_times(model) is None and model.cache.pages.num_used > 0


def prior(**seconds: float) -> TimeTable:
    found = {int(name.removeprefix("n")): value for name, value in seconds.items()}
    return TimeTable(slowdown_rate=0.0, seconds=found, keys=sorted(found))


def test_a_prior_gives_the_shape_and_measurements_the_scale() -> None:
    times = TimeTable(prior=prior(n1=1.0, n4=2.0, n16=6.0))
    assert [times.seconds_at(nodes) for nodes in (1, 4, 10, 16)] == [1.0, 2.0, 4.0, 6.0]
    for _ in range(12):  # this machine is three times slower now
        times.add(4, 6.0)
    assert [times.seconds_at(nodes) for nodes in (1, 4, 10, 16)] == pytest.approx([3.0, 6.0, 12.0, 18.0], rel=0.05)
    for _ in range(15):  # large passes have become worse than the prior says
        times.add(1, 3.0)
        times.add(16, 36.0)
    assert times.seconds_at(1) == pytest.approx(3.0, rel=0.05) and times.seconds_at(16) == pytest.approx(36.0, rel=0.05)
    assert 12.0 < times.seconds_at(10) < 24.0
    assert times.table(16)[10] == pytest.approx(times.seconds_at(10), rel=0.2)


@pytest.mark.parametrize("truth", [0.6, 0.8, 1.5, 2.0])
def test_a_wrong_prior_is_corrected_within_some_steps(truth: float) -> None:
    """The usual number tells the machine's speed, so another one has to carry the whole correction."""
    times = TimeTable(prior=prior(n1=1.0, n9=2.0))
    for _ in range(12):
        times.add(1, 1.0)
        times.add(1, 1.0)
        times.add(9, 2.0 * truth)
    assert times.seconds_at(1) == pytest.approx(1.0, rel=0.05)
    assert times.seconds_at(9) == pytest.approx(2.0 * truth, rel=0.15)


def test_a_new_number_starts_from_its_neighbours() -> None:
    times = TimeTable(prior=prior(n1=1.0, n16=4.0))
    for _ in range(20):
        times.add(1, 1.0)
        for number in (8, 10):
            times.add(number, 0.7 * times.prior.seconds_at(number))
    expected = 0.7 * times.prior.seconds_at(9)
    assert times.seconds_at(9) == pytest.approx(expected, rel=0.03)
    times.add(9, expected)
    assert times.seconds_at(9) == pytest.approx(expected, rel=0.05)


def test_one_slow_pass_says_little_beside_a_prior() -> None:
    """The first pass of a size may take long for reasons of its own. Sizes that are not tried again must recover."""
    times = TimeTable(prior=prior(n1=1.0, n4=1.1, n16=2.0))
    times.add(4, 2.2)
    for _ in range(12):
        times.add(2, prior(n1=1.0, n4=1.1).seconds_at(2))
    assert times.seconds_at(2) == pytest.approx(1.033, rel=0.03)
    assert times.seconds_at(4) == pytest.approx(1.1, rel=0.2) and times.seconds_at(16) == pytest.approx(2.0, rel=0.2)


def test_goodput_starts_with_the_largest_draft_that_pays() -> None:
    """With measured passes, no step is spent on small drafts, and a plain step follows after 16 steps with drafts."""
    policy = Goodput()
    policy.calibrate(target(), 8)
    assert policy._verify_times.prior is not None
    policy._verify_times.prior = prior(n1=1.0, n4=1.01, n9=1.03)  # larger passes are nearly free
    budgets = []
    for _ in range(17):
        budgets += policy.nodes([0], [8])
        accepted = DraftOutcome(8, 8, 8) if budgets[-1] else DraftOutcome(0, 0, 0)
        policy.observe([0], [accepted], 0.0, 1.0 + 0.004 * budgets[-1])
    assert budgets[:16] == [8] * 15 + [0], budgets


def test_goodput_without_measured_passes_starts_small() -> None:
    policy = Goodput()
    busy = target()
    busy.cache.reserve(0, 4)
    policy.calibrate(busy, 8)
    assert policy.nodes([0], [8]) == [0], "the cache was in use, so the first step is a measurement"
