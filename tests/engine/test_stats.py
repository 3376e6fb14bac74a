"""RequestStats and Clock: counters that add up."""

from __future__ import annotations

import json

import pytest

from specdec_fast.engine.stats import PHASES, Clock, RequestStats


def test_counts_by_hand() -> None:
    stats = RequestStats()
    stats.record_step(drafted=3, depth=3, accepted=3, kept=4)  # all accepted, a bonus
    stats.record_step(drafted=3, depth=3, accepted=1, kept=2)  # the second was rejected, the third not reached
    stats.record_step(drafted=3, depth=3, accepted=0, kept=1)
    stats.record_step(drafted=0, depth=0, accepted=0, kept=1)  # plain
    assert (stats.steps, stats.num_draft_tokens, stats.new_tokens) == (4, 9, 8)
    assert stats.tested == [3, 2, 1] and stats.accepted_per_position == [2, 1, 1] and stats.num_accepted == 4
    assert stats.alpha_per_position == [2 / 3, 1 / 2, 1.0]
    assert stats.tau == 2.0 and stats.alpha == 4 / 6


def test_empty_stats() -> None:
    stats = RequestStats()
    assert stats.tau == 0.0 and stats.alpha_per_position == [] and stats.alpha == 0.0
    stats.record_step(drafted=0, depth=0, accepted=0, kept=1)
    assert stats.tau == 1.0 and stats.alpha == 0.0


@pytest.mark.parametrize(("kept", "accepted", "tested"), [(1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 3, 4)])
def test_a_text_that_ends_inside_an_accepted_run_counts_what_it_kept(kept: int, accepted: int, tested: int) -> None:
    """The rule accepted three tokens and rejected the fourth."""
    stats = RequestStats()
    stats.record_step(drafted=5, depth=5, accepted=3, kept=kept)
    assert stats.new_tokens == kept and stats.tau == kept and stats.num_draft_tokens == 5
    assert stats.num_accepted == accepted and stats.tested == [1] * tested


def test_merging_adds_everything() -> None:
    one, two = RequestStats(), RequestStats()
    one.record_step(2, 2, 1, 2)
    two.record_step(4, 4, 4, 5)
    two.preemptions, two.seconds["score"] = 3, 0.5
    one.seconds["score"] = 0.25
    one.merge(two)
    assert (one.steps, one.new_tokens, one.num_draft_tokens, one.preemptions) == (2, 7, 6, 3)
    assert one.tested == [2, 2, 1, 1] and one.accepted_per_position == [2, 1, 1, 1] and one.seconds["score"] == 0.75
    assert two.tested == [1, 1, 1, 1]


def test_stats_convert_to_json() -> None:
    stats = RequestStats()
    stats.record_step(2, 2, 1, 2)
    read = json.loads(json.dumps(stats.as_dict()))
    assert read["alpha"] == stats.alpha == 1 / 2
    assert read["tau"] == 2.0 and read["alpha_per_position"] == [1.0, 0.0] and set(read["seconds"]) == set(PHASES)


def test_the_clock_adds_up_per_phase_and_survives_errors() -> None:
    clock = Clock()
    with clock.time("score"):
        pass
    with pytest.raises(RuntimeError), clock.time("score"):
        raise RuntimeError
    assert clock.seconds["score"] > 0 and clock.seconds["plan"] == 0 and set(clock.seconds) == set(PHASES)
