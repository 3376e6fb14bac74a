"""What earlier drafts cost and brought: expected tokens and nodes by budget, times by nodes."""

from __future__ import annotations

import math
import random

import pytest

from specdec_fast.adaptive.cost_model import CostModel, DraftOutcome, Lengths, TimeTable, never_increasing


def test_expected_tokens_follow_the_nodes_that_were_accepted() -> None:
    """A tree in which nodes 1 and 4 are accepted: nodes 2 and 3 bring nothing alone, but must be there for node 4."""
    model = CostModel()
    for _ in range(100):
        model.observe([0], [6], [DraftOutcome(6, 2, 6, (1, 4))])
    gains = model.node_gains(0, 6)
    assert gains[0] == pytest.approx(1, abs=0.05) and sum(gains) == pytest.approx(2, abs=0.15)
    assert gains[1:4] == [gains[1]] * 3 == pytest.approx([1 / 3] * 3, abs=0.05) and gains[4] < 0.1
    assert gains == sorted(gains, reverse=True) and model.node_gains(0, 3) != gains[:3]


def test_a_draft_that_never_is_there_brings_nothing() -> None:
    model = CostModel()
    for _ in range(60):
        model.observe([0, 1], [8, 0], [DraftOutcome(0, 0, 0)] * 2)
    assert model.size_probabilities(0, 8)[0] < 0.2 and sum(model.node_gains(0, 8)) < 0.2
    assert model.size_probabilities(0, 8)[0] < model.size_probabilities(1, 8)[0] < 0.8, "a new row leans on all rows"


def test_a_pass_of_score_only_nodes_alone_is_no_draft() -> None:
    model = CostModel()
    for _ in range(60):
        model.observe([0], [8], [DraftOutcome(0, 0, 8)])
    assert sum(model.node_gains(0, 8)) < 0.2 and model.size_probabilities(0, 8) == [1.0] * 8


def test_drafts_that_end_by_themselves_are_told_from_those_that_a_budget_ends() -> None:
    """Drafts of 3 tokens, all accepted: a larger budget adds nothing if they had room, and unknown tokens if not."""
    roomy, tight = CostModel(), CostModel()
    for _ in range(100):
        roomy.observe([0], [12], [DraftOutcome(3, 3, 3)])
        tight.observe([0], [3], [DraftOutcome(3, 3, 3)])
    assert sum(roomy.node_gains(0, 12)) == pytest.approx(3, abs=0.3)
    assert sum(roomy.size_probabilities(0, 12)) == pytest.approx(3, abs=0.3)
    assert sum(tight.node_gains(0, 12)) > 10 and sum(tight.size_probabilities(0, 12)) == pytest.approx(12)


@pytest.mark.parametrize("budgets", [(4,), (2, 4), (1, 2, 3, 4)])
def test_small_budgets_do_not_make_the_later_nodes_of_a_tree_look_bad(budgets: tuple[int, ...]) -> None:
    """Node 3 is a child of node 1. Under a budget of 2 nobody knows whether it would have been accepted."""
    source, model = random.Random(3), CostModel()
    model.observe([0], [4], [DraftOutcome(4, 0, 4, ())])
    for step in range(4000):
        drawn = source.random()
        path = (1, 3) if drawn < 0.3 else (1,) if drawn < 0.5 else (2,) if drawn < 0.7 else ()
        budget = budgets[step % len(budgets)]
        own = [node for node in path if node <= budget]
        model.observe([0], [budget], [DraftOutcome(budget, len(own), budget, own)])
        model.release([0])  # the estimate of all rows has less noise
    assert model.node_gains(0, 4) == pytest.approx([0.5, 0.25, 0.25, 0.0], abs=0.13)


def test_how_rarely_there_is_a_draft_says_nothing_of_its_length() -> None:
    """Many steps without a draft lower the chance of a first token, and of no later one."""
    model = CostModel(0.85)
    for _ in range(20):
        model.observe([0], [8], [DraftOutcome(0, 0, 0)])
    gains, sizes = model.node_gains(1, 8), model.size_probabilities(1, 8)
    assert gains[0] < 0.15 and sizes[0] < 0.15
    assert gains[1] / gains[0] == gains[2] / gains[1] == pytest.approx(0.85) and sizes[7] == pytest.approx(sizes[0])


def test_gains_that_increase_share_their_mean() -> None:
    assert never_increasing([]) == []
    assert never_increasing([0.5, 0.4, 0.4, 0.1]) == [0.5, 0.4, 0.4, 0.1]
    assert never_increasing([0.2, 0.0, 0.4, 0.4, 0.1]) == pytest.approx([0.25] * 4 + [0.1])
    assert never_increasing([0.0, 0.3, 0.6]) == pytest.approx([0.3] * 3)


def test_lengths_under_small_and_large_limits_are_counted_as_if_there_were_none() -> None:
    """The oracle draws lengths and limits apart from each other: the estimate is the lengths' own survival."""
    source, lengths = random.Random(7), Lengths(decay=1.0)
    for _ in range(20_000):
        length, limit = min(int(source.expovariate(0.5)), 9), source.choice((1, 2, 4, 9))
        lengths.add(min(length, limit), cut=length >= limit)
    survival = 1.0
    for length, (went_on, could) in enumerate(lengths.trials(6)):
        survival *= went_on / could
        assert survival == pytest.approx(math.exp(-0.5 * (length + 1)), rel=0.07)
    assert lengths.trials(12)[10:] == [(0.0, 0.0)] * 2


def test_late_lengths_count_more_and_weights_stay_finite() -> None:
    lengths = Lengths(decay=0.5)
    for _ in range(200):
        lengths.add(0, cut=False)
        lengths.add(4, cut=True)
    ((went_on, could),) = lengths.trials(1)
    assert (went_on, could) == (pytest.approx(4 / 3), pytest.approx(2.0)), "sums of halves, the last one whole"
    assert lengths.weight <= 1e12


def test_a_table_of_times_has_the_seconds_of_every_number() -> None:
    times = TimeTable()
    assert times.table(3) == [0.0] * 4
    for number, seconds in ((3, 2.0), (9, 5.0), (64, 7.0)):
        times.add(number, seconds)
        for last in (0, 2, 3, 7, 80):
            assert times.table(last) == pytest.approx([times.seconds_at(each) for each in range(last + 1)]), (
                number,
                last,
            )
