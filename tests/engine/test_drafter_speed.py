"""A drafter that makes decoding slower is named once, with the remedy; one that pays is not. Texts stay the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import sleep
from typing import Any

import pytest
from oracles import models

from specdec_fast import Engine, SamplingParams
from specdec_fast.adaptive.budget import Fixed
from specdec_fast.adaptive.cost_model import TimeTable
from specdec_fast.core.draft import Draft
from specdec_fast.engine.drafter_speed import FIRST_WINDOW, DrafterSpeed
from specdec_fast.engine.stats import Clock
from specdec_fast.interfaces import Needs

LONG = SamplingParams(temperature=0, max_new_tokens=3 * FIRST_WINDOW, ignore_eos=True)


class Wrong:
    """Proposes one token, which is hardly ever right, and takes `seconds` for it."""

    name = "wrong"
    num_draft_tokens = 1
    needs = Needs()

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def begin(self, *_: Any) -> None: ...
    def observe(self, *_: Any) -> None: ...
    def release(self, *_: Any) -> None: ...

    def propose(self, view: Any, rows: Any, budget: Any, rng: Any) -> Draft:
        sleep(self.seconds)
        return Draft.chains(
            rows, [[view.tokens(row)[-1], *([0] if limit else [])] for row, limit in zip(rows, budget.nodes)]
        )


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "specdec_fast")
    return lambda: [each.getMessage() for each in caplog.records if "makes decoding slower" in each.getMessage()]


def clock(**seconds: float) -> Clock:
    """A clock that shows these seconds."""
    made = Clock()
    made.seconds.update(seconds)
    return made


def feed(speed: DrafterSpeed, plain: float, kept: int, windows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds steps of 1 second for the pass and 0.1 for the rest, until `windows` comparisons were made."""
    compared: list[float] = []
    monkeypatch.setattr("specdec_fast.engine.drafter_speed.time_plain_pass", lambda *_: compared.append(plain) or plain)
    view: Any = type("View", (), {"tokens": staticmethod(lambda row: [row]), "device": None})
    while len(compared) < windows:
        speed.observe(None, view, [0], kept, clock(score=1.0, verify=0.05, propose=0.05))  # type: ignore[arg-type]


def test_a_slow_drafter_is_named_once(warned: Callable[[], list[str]]) -> None:
    engine = Engine(models.target("llama"), Wrong(0.02))
    for length in (5, 17):
        (handle,) = engine.generate([models.prompt(length)], LONG)
        assert handle.tokens == models.greedy_text("llama", length, LONG.max_new_tokens)
    (message,) = warned()
    assert "drafter wrong" in message and "budget goodput" in message and "text is not affected" in message


def test_a_window_that_is_slow_once_is_a_pause(warned: Callable[[], list[str]], monkeypatch: Any) -> None:
    speed = DrafterSpeed(Wrong(0.0), Fixed())
    feed(speed, 0.5, 1, 1, monkeypatch)
    assert speed.relative_speed == pytest.approx(0.55 / 1.1) and not warned()
    feed(speed, 0.5, 2, 1, monkeypatch)  # 2 tokens a step: as fast as plain
    feed(speed, 0.5, 1, 1, monkeypatch)
    assert not warned()
    feed(speed, 0.5, 1, 1, monkeypatch)
    assert len(warned()) == 1 and "0.50 of the speed" in warned()[0] and "2.00 times the time" in warned()[0]


def test_a_drafter_that_pays_is_compared_less_and_less_often(warned: Any, monkeypatch: Any) -> None:
    speed, passes = DrafterSpeed(Wrong(0.0), Fixed()), []
    monkeypatch.setattr("specdec_fast.engine.drafter_speed.time_plain_pass", lambda *_: passes.append(steps) or 0.9)
    view: Any = type("View", (), {"tokens": staticmethod(lambda row: [row]), "device": None})
    for steps in range(1, 7 * FIRST_WINDOW + 1):  # noqa: B007 (the fake reads it)
        speed.observe(None, view, [0, 1], 4, clock(score=1.0))  # type: ignore[arg-type]
    assert passes == [FIRST_WINDOW, 3 * FIRST_WINDOW, 7 * FIRST_WINDOW]
    assert speed.relative_speed == pytest.approx(1.8) and not warned()


def test_a_plain_pass_that_fails_ends_the_comparisons(warned: Any, monkeypatch: Any) -> None:
    def fail(*_: Any) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("specdec_fast.engine.drafter_speed.time_plain_pass", fail)
    (handle,) = Engine(models.target("llama"), Wrong(0.0)).generate([models.prompt(5)], LONG)
    assert handle.tokens == models.greedy_text("llama", 5, LONG.max_new_tokens) and not warned()


@pytest.mark.parametrize("budget", ["fixed", "goodput"])
def test_what_measures_itself_is_not_compared(budget: str, monkeypatch: Any) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(
        "specdec_fast.engine.drafter_speed.time_plain_pass", lambda *asked: compared.append(asked) or 1.0
    )
    drafter = Wrong(0.0)
    Engine(models.target("llama"), drafter, budget=budget).generate([models.prompt(5)], LONG)
    assert bool(compared) == (budget == "fixed")
    compared.clear()
    drafter.pass_times = TimeTable(prior=TimeTable())  # type: ignore[attr-defined] # as drafter auto has
    Engine(models.target("llama"), drafter, budget=budget).generate([models.prompt(5)], LONG)
    assert not compared
    drafter.pass_times = TimeTable()  # type: ignore[attr-defined] # nothing was measured, so all is drafted
    Engine(models.target("llama"), drafter, budget=budget).generate([models.prompt(5)], LONG)
    assert bool(compared) == (budget == "fixed")


def test_requests_without_drafts_are_not_compared(monkeypatch: Any) -> None:
    engine = Engine(models.target("llama"), Wrong(0.0))
    monkeypatch.setattr(DrafterSpeed, "observe", lambda *_: pytest.fail("compared"))
    handle = engine.submit(models.prompt(5), LONG, num_draft_tokens=0)
    while not handle.finished:
        engine.step()
    assert len(handle.tokens) == LONG.max_new_tokens
