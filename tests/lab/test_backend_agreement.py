"""Agreement of backends, batch positions and rules at temperature 0; planted disagreements are detected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.planted_rules import AlteredRule

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
def test_backends_agree_with_the_reference(name: str) -> None:
    found = same_on_every_backend(name, vocabs=(7, 1300), rows=32)
    assert [each for each in found if not each.holds] == []
    if "cpu" in backends():
        (cpu,) = [each for each in found if each.what.startswith("cpu")]
        assert cpu.compared >= 128


@pytest.mark.parametrize("name", RULES)
def test_the_position_in_the_batch_does_not_matter(name: str) -> None:
    assert [each for each in same_anywhere(name, rows=24, vocab=200) if not each.holds] == []


@pytest.mark.parametrize("name", RULES)
def test_temperature_zero_is_the_arg_max_path(name: str) -> None:
    assert same_when_greedy(name).holds


def alter_rules(monkeypatch: pytest.MonkeyPatch, **how) -> None:
    monkeypatch.setattr(backend_agreement, "get_rule", lambda name: AlteredRule(get_rule(name), **how))


def test_uniforms_keyed_by_batch_position_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    alter_rules(monkeypatch, rng=lambda rng: Rng(rng.seeds * 0 + rng.seeds.argsort(), rng.positions))
    alone, order = same_anywhere("rejection", rows=24, vocab=200)
    assert not alone.holds and not order.holds


def test_a_wrong_greedy_walk_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_one(found, draft, dists, rng):
        return type(found)(found.path, found.num_accepted, (found.next_token + 1) % 50)

    alter_rules(monkeypatch, acceptance=next_one)
    assert not same_when_greedy("rejection").holds


def test_different_thresholds_are_detected() -> None:
    assert not Agreement("rejection", "", 10, 0, 1e-3, 2e-5).holds
    assert not Agreement("rejection", "", 10, 1).holds
    assert Agreement("rejection", "", 10, 0).holds and Agreement("rejection", "", 10, 0).as_dict()["largest"] is None


def test_nan_thresholds_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds, calls = backend_agreement._comparable_thresholds, []

    def broken(*arguments: Any) -> list[torch.Tensor]:
        calls.append(1)
        found = thresholds(*arguments)
        return (
            found if len(calls) % 2 else [each.fill_(torch.nan) for each in found]
        )  # every second call is that of a backend

    monkeypatch.setattr(backend_agreement, "_comparable_thresholds", broken)
    assert not any(each.holds for each in same_on_every_backend("rejection", vocabs=(7,), rows=8))
