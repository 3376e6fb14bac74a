"""Sample drafts for rule `best`: estimates, selection of requests, and no state left behind."""

from __future__ import annotations

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits
from oracles.sampled_chain import DeterministicChain, SampledChain
from oracles.sampled_tree import SampledTree

from specdec_fast import Engine, SamplingParams
from specdec_fast.core.draft import ProposalKind
from specdec_fast.rules import rule_for
from specdec_fast.rules.best import LIKELIEST, RULE
from specdec_fast.tune import rule_selection
from specdec_fast.tune.rule_selection import FIRST_SEED, MOST_REQUESTS, sample_ways

REQUESTS = [([1, 2], SamplingParams(max_new_tokens=24)) for _ in range(8)]


def target(sharpness: float) -> AutomatonTarget:
    return AutomatonTarget(sharpness * random_logits(7, 4, seed=4), max_rows=8, max_length=64, page_size=4)


def sampled_drafter(sharpness: float, draft: float) -> SampledChain:
    reader = target(sharpness)
    table = torch.as_tensor(draft * random_logits(7, 4, seed=4))
    return SampledChain(lambda text: table[reader.state_after(text)], 3)


SHARP = [(6.0, 1.0, "replay"), (1.0, 6.0, "block"), (0.5, 0.8, "block")]


@pytest.mark.parametrize(("sharpness", "draft", "rule"), SHARP)
def test_the_rule_with_the_larger_expectation_is_picked(
    sharpness: float, draft: float, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sharp target accepts the likeliest tokens of a flat draft with the same order, and few sampled ones."""
    monkeypatch.setattr(rule_selection, "MOST_REQUESTS", len(REQUESTS))
    drafter = sampled_drafter(sharpness, draft)
    estimates = sample_ways(target(sharpness), drafter, REQUESTS)
    choice = RULE.choose_rule(drafter.needs, 1.0, estimates)
    assert choice.rule.name == rule and choice.prefers == ("greedy" if rule == "replay" else "sampled")
    assert rule_for("best", drafter.needs, 1.0)[0].name == "block", "what holds for every draft says nothing about it"

    def accepted(drafter: SampledChain, name: str) -> float:
        engine = Engine(target(sharpness), drafter, rule=name)
        engine.generate([[1, 2]] * 60, [SamplingParams(seed=seed, max_new_tokens=24) for seed in range(60)])
        return engine.stats.tau - 1

    table = torch.as_tensor(draft * random_logits(7, 4, seed=4))
    reader = target(sharpness)
    likeliest = DeterministicChain(lambda text: int(table[reader.state_after(text)].argmax()), 3)
    measured = {"block": accepted(drafter, "block"), "replay": accepted(likeliest, "replay")}
    assert max(measured, key=lambda name: measured[name]) == rule
    assert float(estimates["block"].mean()) == pytest.approx(measured["block"], abs=0.3)


def test_a_difference_that_the_sample_cannot_show_keeps_the_rule_of_the_theorem() -> None:
    """Both ways accept about as much here, and single samples favour either."""
    favoured = set()
    for seed in range(4):
        requests = [([1, at % 4, seed % 4, (seed + at) % 4], SamplingParams(max_new_tokens=8)) for at in range(2)]
        drafter = sampled_drafter(2.0, 1.0)
        estimates = sample_ways(target(2.0), drafter, requests)
        favoured.add(bool(estimates[LIKELIEST].mean() > estimates["block"].mean()))
        assert RULE.choose_rule(drafter.needs, 1.0, estimates).rule.name == "block"
    assert favoured == {True, False}, "the case tests nothing"


def test_trees_are_estimated_by_their_rules() -> None:
    shape = [(0, ProposalKind.SAMPLED), (0, ProposalKind.SAMPLED_WITHOUT_EARLIER), (1, ProposalKind.SAMPLED)]
    drafter = SampledTree(sampled_drafter(1.0, 0.3).logits_after, shape)
    estimates = sample_ways(target(1.0), drafter, REQUESTS)
    assert (
        set(estimates) == {"traversal", "recursive_rejection", LIKELIEST}
        and estimates["traversal"].mean() >= estimates["recursive_rejection"].mean() > 0.5
    )


def test_a_sample_shares_no_uniform_with_requests_and_leaves_no_row_behind() -> None:
    seen: list[tuple[int, ...]] = []

    class Watched(SampledChain):
        def propose(self, view, rows, budget, rng):  # type: ignore[no-untyped-def]
            seen.append(tuple(rng.seeds.tolist()))
            return super().propose(view, rows, budget, rng)

    ours, drafter = target(1.0), sampled_drafter(1.0, 1.0)
    watched = Watched(drafter.logits_after, 3)
    sample_ways(ours, watched, [([1, 2], SamplingParams(max_new_tokens=5, seed=3, temperature=0.7))] * 8)
    own = {SamplingParams(seed=FIRST_SEED + at).with_derived_seed([1, 2]).seed for at in range(MOST_REQUESTS)}
    assert {seed for seeds in seen for seed in seeds} == own and len(own) == MOST_REQUESTS
    engine, alone = (Engine(mine, drafter, rule="block") for mine in (ours, target(1.0)))
    params = [SamplingParams(seed=3 + at, max_new_tokens=12) for at in range(8)]
    assert engine.generate([[1, 2]] * 8, params)[7].tokens == alone.generate([[1, 2]], params[7:])[0].tokens


def test_requests_without_information_are_skipped() -> None:
    refused, certain = SamplingParams(stop=("x",)), SamplingParams(temperature=0)
    assert sample_ways(target(1.0), sampled_drafter(1.0, 1.0), [([1], refused), ([1], certain)]) == {}
    assert (
        RULE.choose_rule(sampled_drafter(1.0, 1.0).needs, None, {}).why
        == rule_for("best", sampled_drafter(1.0, 1.0).needs)[1]
    )
