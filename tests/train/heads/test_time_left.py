"""The remaining time: nothing before it is measured, then steps, measurements, checkpoints and the head."""

from __future__ import annotations

import math

import pytest

from specdec_fast.train.heads.time_left import TimeLeft, format_seconds


def test_the_time_follows_from_what_was_measured() -> None:
    left = TimeLeft(steps=10, measure_every=4, final_measurements=1)
    left.add_measurement(7.0)
    assert math.isnan(left.seconds(0))
    left.add_step(60.0)  # the first one compiles
    assert math.isnan(left.seconds(1))
    left.add_step(2.0)
    assert left.seconds(2) == pytest.approx(8 * 2 + (3 + 1) * 7), "after steps 4, 8 and 10, and for the head"
    left.add_checkpoint(3.0)
    assert left.seconds(2) == pytest.approx(8 * 2 + 4 * 7 + (8 / 2 + 1) * 3), "as often as before, and the head"
    left.add_step(4.0)
    left.add_measurement(5.0)
    assert left.seconds(10) == pytest.approx(5 + 3), "the head is left"


def test_a_slower_machine_counts_soon() -> None:
    left = TimeLeft(steps=1000, measure_every=1000)
    for seconds in [1.0] * 100 + [3.0] * 50:
        left.add_step(seconds)
    assert left.seconds(151) == pytest.approx(849 * 3)


def test_times_as_text() -> None:
    found = [format_seconds(seconds) for seconds in (math.nan, -1.0, 119.2, 150.0, 7199.0, 7260.0)]
    assert found == ["", "0 s left", "119 s left", "2 min left", "2 h 00 min left", "2 h 01 min left"]
