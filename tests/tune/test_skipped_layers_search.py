"""The search for sub-blocks to skip: on objectives with a known optimum, resumed, measured on a tiny model."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import pytest
from oracles import models

from specdec_fast import SamplingParams, load
from specdec_fast.targets.skipped_layers import SkippedLayers
from specdec_fast.tune.skipped_layers_search import Bench, Trial, best_of, confirm, judge, search


def separable(best: SkippedLayers, layers: int, noise: float = 0.0) -> Any:
    """An objective that every bit adds to on its own; the optimum is `best`, at 0.5."""
    source, want = random.Random(1), best.bits(layers)

    def measure(skip: SkippedLayers) -> Trial:
        wrong = sum((1 + at % 3) * (bit != right) for at, (bit, right) in enumerate(zip(skip.bits(layers), want)))
        return Trial(skip, 0.5 + 0.05 * wrong + noise * source.gauss(0, 1), noise)

    return measure


def test_a_separable_objective_is_solved() -> None:
    pytest.importorskip("optuna")
    best = SkippedLayers((0, 2), (1, 3))
    found = list(search(separable(best, 4), 4, 45, starts=[SkippedLayers(), SkippedLayers.middle(4)]))
    assert len(found) == 45 and best_of(found).skip == best and best_of(found).cost == 0.5
    assert [trial.skip for trial in found[:2]] == [SkippedLayers(), SkippedLayers.middle(4)]
    guesses = random.Random(0)
    measure = separable(best, 4)
    blind = min(measure(SkippedLayers.of_bits(guesses.randrange(2) for _ in range(8))).cost for _ in range(45))
    assert blind > 0.5, "the optimum is not found by chance"


def test_a_search_continues_from_earlier_trials() -> None:
    pytest.importorskip("optuna")
    best = SkippedLayers((1,), (0, 2))
    measure, calls = separable(best, 3, noise=0.005), 0

    def counted(skip: SkippedLayers) -> Trial:
        nonlocal calls
        calls += 1
        return measure(skip)

    first = []
    for trial in search(counted, 3, 30, starts=[SkippedLayers()]):
        first.append(trial)
        if len(first) == 12:
            break
    rest = list(search(counted, 3, 30, done=first, starts=[SkippedLayers()]))
    assert (len(first), len(rest), calls) == (12, 18, 30)
    assert best_of([*first, *rest]).skip == best
    assert list(search(counted, 3, 30, done=[*first, *rest])) == [] and calls == 30


def test_the_best_is_judged_by_all_its_trials_and_measured_again() -> None:
    lucky, steady = SkippedLayers((0,), ()), SkippedLayers((1,), ())
    trials = [Trial(lucky, 0.6), Trial(steady, 0.7), Trial(SkippedLayers(), 1.1), Trial(SkippedLayers((0, 1), ()), 1.5)]
    assert best_of(trials).skip == lucky
    again = confirm(lambda skip: Trial(skip, 0.95 if skip == lucky else 0.7), trials)
    assert [trial.skip for trial in again] == [lucky, steady, SkippedLayers((0, 1), ())]
    best = best_of([*trials, *again])
    assert best.skip == steady and best.cost == pytest.approx(0.7)
    assert best_of([Trial(lucky, 0.6, 0.2), Trial(lucky, 0.8, 0.1)]).noise == pytest.approx(math.sqrt(0.02))
    with pytest.raises(ValueError, match="got no trials"):
        best_of([])


def test_nothing_skipped_never_wins() -> None:
    nothing, some = SkippedLayers(), SkippedLayers((1,), ())
    assert best_of([Trial(nothing, 0.5), Trial(some, 1.2)]).skip == some
    assert best_of([Trial(nothing, 0.5)]).skip == nothing, "there is no other"
    assert not judge(lambda skip: Trial(skip, 0.5), nothing, 3).pays


@pytest.mark.parametrize(
    ("costs", "pays", "rounds"),
    [
        ([0.90, 0.91, 0.89, 0.90, 0.92, 0.88], True, 6),
        ([0.97, 0.90, 1.04, 0.95, 1.02, 0.94], False, 6),  # the mean is below 1, by less than the noise
        ([1.20, 1.30, 1.25, 0.1, 0.1, 0.1], False, 3),  # half of the rounds decide
    ],
)
def test_a_gain_is_compared_with_the_noise(costs: list[float], pays: bool, rounds: int) -> None:
    left = iter(costs)
    found = judge(lambda skip: Trial(skip, next(left), tau=1.5), SkippedLayers((1,), ()), 6)
    assert (found.pays, found.rounds, found.tau) == (pays, rounds, 1.5)
    assert found.cost.low < found.cost.mean < found.cost.high
    with pytest.raises(ValueError, match="rounds: got 2; expected at least 3"):
        judge(lambda skip: Trial(skip, 1.0), SkippedLayers(), 2)


def test_trials_survive_json() -> None:
    trial = Trial(SkippedLayers((1,), (0, 2)), 0.9, 0.01, 4.0, 4.4, 1.7)
    assert Trial.from_json(trial.as_json()) == trial
    for broken in ({}, {"skip": None}, 7, {**trial.as_json(), "cost": None}):
        with pytest.raises(ValueError, match="cannot be read"):
            Trial.from_json(broken)


def test_measuring_counts_tokens_as_they_come() -> None:
    engine = load(models.own("llama"), max_length=64, max_rows=2)
    texts = [models.prompt(9), models.prompt(5)]
    bench = Bench(engine.target, texts, new_tokens=12, repeats=3, stop="fixed", num_draft_tokens=3)
    whole, nothing = bench(SkippedLayers()), bench(SkippedLayers((0, 1), (0, 1)))
    assert whole.tau == 4.0 and nothing.tau < 2
    assert whole.noise > 0 and whole.ms > 0 and whole.plain_ms > 0
    assert whole.cost == pytest.approx(whole.ms / whole.plain_ms, rel=0.9)
    want = engine.generate(texts, SamplingParams(temperature=0, max_new_tokens=12))
    ends = [handle.tokens[4] for handle in want]
    early = Bench(engine.target, texts, new_tokens=12, repeats=1, eos_token_ids=ends, stop="fixed", num_draft_tokens=3)
    assert early(SkippedLayers()).tau <= 5 / 2 and early(SkippedLayers()).noise == 0
    assert engine.target.cache.pages.num_used == 0


@pytest.mark.parametrize("wrong", [{"new_tokens": 0}, {"repeats": 0}])
def test_bad_sizes(wrong: dict[str, int]) -> None:
    target = models.target("llama", max_rows=1)
    with pytest.raises(ValueError, match="got 0; expected at least 1"):
        Bench(target, [[1]], **wrong)
    with pytest.raises(ValueError, match="prompts: got 0; expected at least 1"):
        Bench(target, [])


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"tune: optuna is not installed; .*run `pip install -e '.\[tune\]'`"):
        next(iter(search(separable(SkippedLayers(), 2), 2, 3)))
