"""What earlier drafts cost and brought: expected tokens by budget, chances of a draft, times by nodes."""

from __future__ import annotations

import pytest

from specdec_fast.adaptive.cost_model import CostModel, DraftOutcome, TimeTable


def test_expected_tokens_of_a_tree_follow_the_depth_of_its_drafts() -> None:
    model = CostModel()
    for _ in range(60):
        model.observe([0], [14], [DraftOutcome(14, 3, 3, 2, 14)])
        model.observe([0], [2], [DraftOutcome(2, 1, 1, 1, 2)])
    gains = model.expected_accepted(0, 14)
    assert gains == sorted(gains) and len(gains) == 15
    assert abs(gains[14] - 2.0) < 0.35 and abs(gains[2] - 1.0) < 0.2 and gains[14] < 3
    assert model.expected_accepted(0, 5) == gains[:6] and model.draft_probability(0) == 1
    for _ in range(60):
        model.observe([0, 1], [8, 0], [DraftOutcome(0, 0, 0, 0, 0)] * 2)
    assert model.expected_accepted(0, 14) == gains, "given that there is a draft"
    assert model.draft_probability(0) < 0.2 and model.draft_probability(0) < model.draft_probability(1) < 0.8


def test_a_pass_of_score_only_nodes_alone_is_no_draft() -> None:
    model = CostModel()
    for _ in range(60):
        model.observe([0], [8], [DraftOutcome(0, 0, 0, 0, 8)])
    assert model.draft_probability(0) < 0.2 and model.scoring_probability(0) == 1


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
