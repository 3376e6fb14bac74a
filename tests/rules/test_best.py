"""Rule best: which rule it picks for what a drafter does, why, and that its reasons are true."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import product

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits
from oracles.noisy_oracle import NoisyChain, NoisyTree
from oracles.sampled_chain import SampledChain
from oracles.tree_cases import CASES, Case, accepted, check_cells, ids
from oracles.tree_rules import DETERMINISTIC, ordered, traversal

from specdec_fast import Engine, SamplingParams
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Needs
from specdec_fast.rules import rule_for, rule_names
from specdec_fast.rules.best import LIKELIEST, RULE, paired_gain
from specdec_kernels import distribution_stats, use_backend


@pytest.mark.parametrize(
    ("needs", "temperature", "rule", "why"),
    [
        (Needs(dists=True), None, "block", "samples chains"),
        (Needs(topology="tree", dists=True), None, "traversal", "samples trees"),
        (Needs(), None, "replay", "deterministic tokens"),
        (Needs(topology="tree"), 1.0, "replay", "seed alone"),
        (Needs(topology="tree", dists=True), 0.0, "greedy", "arg-max"),
    ],
)
def test_the_choice_follows_the_drafter_and_says_why(
    needs: Needs, temperature: float | None, rule: str, why: str
) -> None:
    choice = RULE.choose_rule(needs, temperature)
    assert choice.rule.name == rule and why in choice.why
    assert choice.rule.lossless and choice.rule.why_not(needs) is None


@pytest.mark.parametrize(
    ("needs", "means", "rule", "prefers"),
    [
        (Needs(dists=True), {"block": 2.1, "rejection": 2.0, "replay": 1.9, LIKELIEST: 2.2}, "replay", "greedy"),
        (Needs(dists=True), {"block": 2.1, "rejection": 2.0, "replay": 1.9, LIKELIEST: 2.05}, "block", "sampled"),
        (Needs("tree", dists=True), {"traversal": 1.5, "recursive_rejection": 1.4, LIKELIEST: 1.6}, "replay", "greedy"),
        (
            Needs("tree", dists=True),
            {"traversal": 1.5, "recursive_rejection": 1.4, LIKELIEST: 1.5},
            "traversal",
            "sampled",
        ),
    ],
)
def test_a_sample_decides_whether_to_sample(needs: Needs, means: dict[str, float], rule: str, prefers: str) -> None:
    """Estimates whose differences are the same for every draft have no noise."""
    drafts = torch.linspace(-1, 1, 7, dtype=torch.float64)
    estimates = {way: value + drafts for way, value in means.items()}
    choice = RULE.choose_rule(needs, None, estimates)
    assert (choice.rule.name, choice.prefers) == (rule, prefers)
    assert all(f"{value:.3f}" in choice.why for value in means.values())
    assert f"{means[LIKELIEST]:.3f} of the likeliest tokens" in choice.why
    assert RULE.choose_rule(needs, 0.0, estimates).rule.name == "greedy"
    assert RULE.choose_rule(Needs(), None, estimates) == RULE.choose_rule(Needs(), None)


@pytest.mark.parametrize(
    ("gains", "rule", "words"),
    [
        ([0.4, 0.2, 0.3, 0.3], "replay", r"likeliest tokens gain \+0.300 \+- 0.125 \(95 % interval\)$"),
        (
            [1.2, -0.9, 1.0, -0.1],
            "block",
            r"gain \+0.300 \+- 1.506 \(95 % interval\), which is within the noise",
        ),
        ([-1.2, 0.9, -1.0, 0.1], "block", r"gain -0.300 \+- 1.506 \(95 % interval\)$"),
        ([5.0, 5.0], "block", r"gain \+5.000 \+- inf \(95 % interval\), which is within the noise"),
    ],
)
def test_a_gain_within_the_noise_of_the_sample_changes_no_rule(gains: list[float], rule: str, words: str) -> None:
    """The noise is that of the differences: drafts that are easy for both ways count for neither."""
    block = torch.tensor([0.1, 3.0, 1.5, 0.7], dtype=torch.float64)[: len(gains)]
    own = torch.tensor(gains, dtype=torch.float64)
    estimates = {"block": block, "rejection": block - 0.1, "replay": block - 0.2, LIKELIEST: block + own}
    choice = RULE.choose_rule(Needs(dists=True), None, estimates)
    assert choice.rule.name == rule and re.search(words, choice.why)


@pytest.mark.parametrize(("drafts", "quantile"), [(4, 3.182), (6, 2.571), (11, 2.228), (25, 2.064), (1001, 1.962)])
def test_the_interval_is_that_of_student(drafts: int, quantile: float) -> None:
    gains = torch.linspace(-1, 1, drafts, dtype=torch.float64)
    noise = paired_gain(gains, torch.zeros(drafts))[1]
    assert noise == pytest.approx(quantile * float(gains.std()) / drafts**0.5, rel=0.04 if drafts < 5 else 0.01)


def test_accepted_tokens_of_a_draft_are_estimated_for_every_rule_that_takes_it() -> None:
    """In the mean over all drafts: block above rejection, and rejection above replay of coupled tokens."""
    target = random_logits(11, 6)
    p = TokenDistributions(
        torch.as_tensor(target[:4]).double(), *distribution_stats(torch.as_tensor(target[:4]).double(), *_plain(4))
    )
    q = torch.as_tensor(random_logits(11, 6, seed=9)[:3]).double()
    q = TokenDistributions(q, *distribution_stats(q, *_plain(3)))
    found = []
    for tokens in product(range(6), repeat=3):
        draft = Draft.chains([0], [[0, *tokens]], dist_rows=[[0, 1, 2]], dists=q)
        estimates = {rule: float(value) for rule, value in RULE.estimate_accepted(Needs(dists=True), draft, p).items()}
        assert list(estimates) == ["block", "rejection", "replay", LIKELIEST]
        found.append((float(q.probs()[range(3), tokens].prod()), estimates))
    block, rejection, replay = (
        sum(chance * each[rule] for chance, each in found) for rule in ("block", "rejection", "replay")
    )
    assert block > rejection > replay > 0.2


def _plain(rows: int) -> tuple[torch.Tensor, ...]:
    return torch.ones(rows), torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows)


def test_an_engine_runs_the_selected_rule() -> None:
    target = AutomatonTarget(random_logits(11, 6))
    assert Engine(target, rule="best").rule.name == "replay"
    engine = Engine(target, NoisyTree([], 0.8, 6), rule="best")
    assert engine.rule.name == "replay" and "seed alone" in engine.why_rule
    sampled = SampledChain(lambda tokens: torch.from_numpy(target.logits_after(tokens)), 3)
    engine = Engine(target, sampled, rule="best")
    assert engine.rule.name == "block" and "samples chains" in engine.why_rule
    assert len(engine.generate([[1, 2]], SamplingParams(seed=3, max_new_tokens=9))[0].tokens) == 9
    assert Engine(target, sampled, rule="rejection").why_rule == "asked for by name"


def test_an_engine_that_knows_its_temperature_says_what_follows_from_it() -> None:
    target = AutomatonTarget(random_logits(11, 6))
    sampled = SampledChain(lambda tokens: torch.from_numpy(target.logits_after(tokens)), 3)
    engine = Engine(target, sampled, rule="best", temperature=0.0)
    assert engine.explain().startswith("rule greedy: at temperature 0 every rule keeps exactly the target's arg-max")
    with pytest.raises(ValueError, match=r"rule greedy: got temperature 1\.0"):
        engine.submit([1], SamplingParams())
    for temperature in (None, 0.7):
        engine = Engine(target, sampled, rule="best", temperature=temperature)
        assert engine.explain().startswith("rule block: the drafter samples chains")
    assert Engine(target, sampled, rule="rejection", temperature=0.0).rule.name == "rejection"


def test_a_pair_that_does_not_fit_is_refused_with_reasons() -> None:
    trees = Needs(topology="tree", dists=True)
    fits = {name for name in rule_names() if name not in ("best", "lossy") and not _refused(name, trees)}
    assert {"greedy", "replay", "traversal", "recursive_rejection"} <= fits and not fits & {"rejection", "block"}
    target, drafter = AutomatonTarget(random_logits(11, 6)), NoisyTree([], 0.8, 6)
    for rule in ("rejection", "block"):
        for temperature in (1.0, None):
            message = f"rule {rule}: got drafter {drafter.name}, which proposes trees; expected chains, or another"
            with pytest.raises(
                ValueError, match=re.escape(message) + r" rule \(best, .*recursive_rejection, .*replay, .*traversal"
            ):
                Engine(target, drafter, rule=rule, temperature=temperature)
    NoisyChain([], 0.8, 6)


def _refused(name: str, needs: Needs) -> bool:
    try:
        rule_for(name, needs)
    except ValueError:
        return True
    return False


CHOSEN_ONLY = [case for case in CASES if set(case.marks) == {DETERMINISTIC}]


@pytest.mark.parametrize("case", CHOSEN_ONLY, ids=ids)
def test_where_nothing_is_sampled_all_rules_accept_the_same(case: Case) -> None:
    """Expected accepted tokens: the chance that the target itself draws each path, as replay's choices do."""
    ((_, tree),) = case.trees()
    paths = {tree.text(node) for node in range(1, len(tree.nodes)) if not _below_score_only(case, node)}
    own = Fraction(0)
    for text in paths:
        chance = Fraction(1)
        for at, token in enumerate(text):
            chance *= tree.p_after(text[:at])[token]
        own += chance
    assert accepted(case, ordered) == accepted(case, traversal) == own


def _below_score_only(case: Case, node: int) -> bool:
    return node > 0 and (node in case.score_only or _below_score_only(case, case.parents[node - 1]))


def test_called_without_a_choice_it_takes_every_draft() -> None:
    with use_backend("reference"):
        for case in CASES[5:12]:
            check_cells(case, RULE, traversal)
