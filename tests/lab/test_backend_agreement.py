"""Backends, places in the batch and temperature 0: agreement, and the notice of disagreement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.planted_rules import Planted

from specdec_fast.interfaces import Rng
from specdec_fast.lab import backend_agreement
from specdec_fast.lab.backend_agreement import (
    Agreement,
    backends,
    same_anywhere,
    same_on_every_backend,
    same_when_greedy,
)
from specdec_fast.lab.exact_distributions import own_rules
from specdec_fast.rules import get_rule

RULES = own_rules()


@pytest.mark.parametrize("name", RULES)
def test_backends_answer_as_the_reference(name: str) -> None:
    found = same_on_every_backend(name, vocabs=(7, 1300), rows=32)
    assert [each for each in found if not each.holds] == []
    if "cpu" in backends():
        (cpu,) = [each for each in found if each.what.startswith("cpu")]
        assert cpu.compared >= 128


@pytest.mark.parametrize("name", RULES)
def test_a_row_does_not_feel_its_place(name: str) -> None:
    assert [each for each in same_anywhere(name, rows=24, vocab=200) if not each.holds] == []


@pytest.mark.parametrize("name", RULES)
def test_temperature_zero_is_the_arg_max_path(name: str) -> None:
    assert same_when_greedy(name).holds


def spoilt(monkeypatch: pytest.MonkeyPatch, **how) -> None:
    monkeypatch.setattr(backend_agreement, "get_rule", lambda name: Planted(get_rule(name), **how))


def test_coins_by_place_in_the_batch_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(monkeypatch, rng=lambda rng: Rng(rng.seeds * 0 + rng.seeds.argsort(), rng.positions))
    alone, order = same_anywhere("rejection", rows=24, vocab=200)
    assert not alone.holds and not order.holds


def test_a_wrong_greedy_walk_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_one(found, draft, dists, rng):
        return type(found)(found.path, found.num_accepted, (found.next_token + 1) % 50)

    spoilt(monkeypatch, answer=next_one)
    assert not same_when_greedy("rejection").holds


def test_thresholds_that_differ_are_seen() -> None:
    assert not Agreement("rejection", "", 10, 0, 1e-3, 2e-5).holds
    assert not Agreement("rejection", "", 10, 1).holds
    assert Agreement("rejection", "", 10, 0).holds and Agreement("rejection", "", 10, 0).as_dict()["largest"] is None


def test_thresholds_that_are_no_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, calls = backend_agreement._shown, []

    def broken(*arguments: Any) -> list[torch.Tensor]:
        calls.append(1)
        found = shown(*arguments)
        return found if len(calls) % 2 else [each.fill_(torch.nan) for each in found]  # every second is a backend's

    monkeypatch.setattr(backend_agreement, "_shown", broken)
    assert not any(each.holds for each in same_on_every_backend("rejection", vocabs=(7,), rows=8))
