"""Pauses begin after a window that cost more than it gained, grow, and end where the part gains again."""

from __future__ import annotations

import random

from specdec_fast.adaptive.rest import FIRST, LONGEST, SHARE, WINDOW, Rest


def paused(rest: Rest) -> int:
    """Steps until the part takes part again."""
    steps = 0
    while not rest.takes_part():
        steps += 1
        assert steps <= LONGEST, "pauses end"
    return steps


def window(rest: Rest, cost: float, gain: float, step: float = 1e4) -> None:
    for _ in range(WINDOW):
        rest.add(cost, gain, step)


def test_a_part_that_gains_never_pauses() -> None:
    rest = Rest()
    for _ in range(5):
        window(rest, 1.0, 1.5)
        assert paused(rest) == 0


def test_the_sum_over_a_window_decides() -> None:
    rest = Rest()
    rest.add(1.0, 2.0 * WINDOW, 1e4)
    for _ in range(WINDOW - 1):
        assert rest.takes_part()
        rest.add(1.0, 0.0, 1e4)
    assert paused(rest) == 0


def test_pauses_double_up_to_the_longest() -> None:
    rest, lengths = Rest(), []
    for _ in range(6):
        window(rest, 1.0, 0.5)
        lengths.append(paused(rest))
    assert lengths == [FIRST, 2 * FIRST, 4 * FIRST, LONGEST, LONGEST, LONGEST]


def test_a_pause_is_prolonged_until_the_loss_is_a_small_share() -> None:
    """Each step of the window lost a tenth of a step of 2 seconds, and SHARE is a hundredth: 80 steps in all."""
    rest = Rest()
    window(rest, 0.5, 0.3, step=2.0)
    assert abs(paused(rest) + WINDOW - 0.1 * WINDOW / SHARE) <= 1
    window(rest, 1.0, 0.0, step=1.0)
    assert paused(rest) == LONGEST


def test_a_gain_makes_the_next_pause_short_again() -> None:
    rest = Rest()
    for _ in range(3):
        window(rest, 1.0, 0.0)
        paused(rest)
    window(rest, 1.0, 3.0)
    window(rest, 1.0, 0.0)
    assert paused(rest) == FIRST


def test_a_pause_that_is_ended_leaves_the_next_one_as_long() -> None:
    rest = Rest()
    window(rest, 1.0, 0.0)
    assert not rest.takes_part()
    rest.end()
    assert rest.takes_part()
    window(rest, 1.0, 0.0)
    assert paused(rest) == 2 * FIRST


def test_a_pause_that_is_ended_goes_on_until_its_window_is_made_up_for() -> None:
    """Short requests, each of which ends the pause before it, cost no more than a long one."""
    rest = Rest()
    window(rest, 0.5, 0.3, step=2.0)
    steps = 0
    while not rest.takes_part():
        rest.end()
        steps += 1
        assert steps <= LONGEST
    assert abs(steps + WINDOW - 0.1 * WINDOW / SHARE) <= 1


def test_an_ended_pause_begins_a_new_window() -> None:
    rest = Rest()
    for _ in range(WINDOW - 1):
        rest.add(1.0, 0.0, 1e4)
    rest.end()
    rest.add(1.0, 0.0, 1e4)
    assert rest.takes_part()


def test_equal_costs_and_gains_give_equal_pauses() -> None:
    """Pauses depend on nothing else: not on a clock, on chance, or on other parts."""
    source = random.Random(3)
    sums = [(source.random(), source.random()) for _ in range(30)]

    def lengths() -> list[int]:
        rest, found = Rest(), []
        for each in sums:
            window(rest, *each)
            found.append(paused(rest))
        return found

    first = lengths()
    assert first == lengths() and {0, FIRST, 2 * FIRST} <= {*first}
