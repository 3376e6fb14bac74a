"""The remaining time of a search: nothing before a trial was measured."""

from __future__ import annotations

import pytest

from specdec_fast.tune import time_left
from specdec_fast.tune.time_left import TrialClock


def test_the_time_is_that_of_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time_left, "monotonic", lambda: now[0])
    clock = TrialClock(last=9)
    now[0] = 150.0  # models are loaded
    assert clock.of(5) == ""
    clock.start()
    now[0] = 152.0
    assert clock.after_trial(3) == ", about 24 s left"
    now[0] = 160.0
    assert clock.after_trial(2) == ", about 55 s left" and clock.after_trial(None) == ""
    now[0] = 500.0
    assert clock.of(60) == ", about 5 min left"
