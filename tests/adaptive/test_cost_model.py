"""What earlier drafts cost and brought: expected tokens by budget, chances of a draft, times by nodes."""

from __future__ import annotations

import pytest

from specdec_fast.adaptive.cost_model import CostModel, Outcome, Times


def test_expected_tokens_of_a_tree_follow_the_depth_of_its_drafts() -> None:
    record = CostModel()
    for _ in range(60):
        record.observe([0], [14], [Outcome(14, 3, 3, 2, 14)])
        record.observe([0], [2], [Outcome(2, 1, 1, 1, 2)])
    gains = record.expected(0, 14)
    assert gains == sorted(gains) and len(gains) == 15
    assert abs(gains[14] - 2.0) < 0.35 and abs(gains[2] - 1.0) < 0.2 and gains[14] < 3
    assert record.expected(0, 5) == gains[:6] and record.answered(0) == 1
    for _ in range(60):
        record.observe([0, 1], [8, 0], [Outcome(0, 0, 0, 0, 0)] * 2)
    assert record.expected(0, 14) == gains, "of drafts that are there"
    assert record.answered(0) < 0.2 and record.answered(0) < record.answered(1) < 0.8


def test_a_pass_of_score_only_alone_is_no_draft_that_was_answered() -> None:
    record = CostModel()
    for _ in range(60):
        record.observe([0], [8], [Outcome(0, 0, 0, 0, 8)])
    assert record.answered(0) < 0.2 and record.scored(0) == 1


def test_a_table_of_times_has_the_seconds_of_every_number() -> None:
    times = Times()
    assert times.table(3) == [0.0] * 4
    for number, seconds in ((3, 2.0), (9, 5.0), (64, 7.0)):
        times.add(number, seconds)
        for last in (0, 2, 3, 7, 80):
            assert times.table(last) == pytest.approx([times.at(each) for each in range(last + 1)]), (number, last)
