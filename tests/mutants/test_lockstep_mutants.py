"""Planted mistakes of engines that compute one model together, each noticed by a named test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine import test_lockstep

from specdec_fast.engine import lockstep
from specdec_fast.engine.lockstep import Lockstep


def each_rank_draws_its_own_seeds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lockstep, "next_seed", lambda self: None)


def seeds_repeat(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lockstep, "request_seed", lambda *values: 7)


def drafts_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lockstep, "_draft_checksum", lambda draft: 0)


def texts_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lockstep, "_text_checksum", lambda self: 0)


def parameters_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lockstep, "_plain", lambda value: None)


def numbers_of_requests_stay_apart(patch: pytest.MonkeyPatch) -> None:
    """After a difference, the next request has another number on each rank, so its seed differs."""
    compare = Lockstep.compare

    def broken(self: Lockstep, *values: Any, **more: Any) -> None:
        before = self.next_id
        try:
            compare(self, *values, **more)
        finally:
            self.next_id = before

    patch.setattr(Lockstep, "compare", broken)


def difference(calls: Callable[..., None], fact: str) -> Callable[[], None]:
    return lambda: test_lockstep.test_a_difference_is_an_error_everywhere_and_engines_go_on(calls, fact)


SEEDS = test_lockstep.test_unseeded_requests_have_the_same_seeds_everywhere_and_others_in_the_next_run
MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = [
    (each_rank_draws_its_own_seeds, SEEDS),
    (seeds_repeat, SEEDS),
    (drafts_do_not_count, test_lockstep.test_other_drafts_are_found_before_they_are_scored),
    (texts_do_not_count, difference(test_lockstep.other_tokens, "its texts")),
    (parameters_do_not_count, difference(test_lockstep.other_params, "its requests")),
    (numbers_of_requests_stay_apart, difference(test_lockstep.one_submits_nothing, "its requests")),
]


@pytest.mark.parametrize(("plant", "check"), MUTANTS, ids=[plant.__name__ for plant, _ in MUTANTS])
def test_a_planted_mistake_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()
