"""The lossy rules do what their papers say, are another distribution than the target's, and come only when asked
for.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import exp

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits
from oracles.exact import Text, target_dist
from oracles.noisy_oracle import NoisyChain, NoisyTree
from oracles.plain_decoding import plain_decode
from oracles.tree_cases import Case, check_dist, dist_of_cells
from oracles.tree_drafts import packed
from oracles.tree_rules import DETERMINISTIC, SAMPLED

from specdec_fast import Engine, SamplingParams, get_rule
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Needs, Rng, Rule
from specdec_fast.rules.lossy import Lenience, TopTokens, Typical
from specdec_fast.rules.replay import Replay
from specdec_kernels import distribution_stats, tree_plan

CHAINS = [Case(3, tuple(range(size)), (SAMPLED,) * size, 60 + 10 * size + seed) for size in (1, 2) for seed in range(4)]
TREES = [Case(3, (0, 0, 1), (DETERMINISTIC, DETERMINISTIC, DETERMINISTIC), seed) for seed in (1, 2, 3)]


def distance(case: Case, rule: Typical | Lenience | TopTokens) -> float:
    """Total variation between what the rule emits and the target's distribution."""
    found, length = dist_of_cells(case, rule, "ordered")
    exact = target_dist(case.target.after, length)
    assert sum(found.values()) == pytest.approx(1)
    return sum(abs(found.get(text, 0.0) - float(exact.get(text, 0))) for text in found.keys() | exact.keys()) / 2


def test_their_distributions_are_not_the_target_s() -> None:
    assert max(distance(case, Lenience(0.5)) for case in CHAINS) > 0.05
    assert max(distance(case, Typical()) for case in TREES) > 0.05
    assert max(distance(case, TopTokens(2)) for case in TREES) > 0.05


def test_without_lenience_it_is_rule_token() -> None:
    for case in CHAINS:
        check_dist(case, Lenience(1.0), "ordered")


@pytest.mark.parametrize("lenience", [0.3, 0.5, 0.9])
def test_lenience_bounds_every_token_by_p_over_l(lenience: float) -> None:
    """Leviathan et al. (2023), appendix A.5; and more is accepted the smaller l is."""
    for case in CHAINS[:4]:
        found, _ = dist_of_cells(case, Lenience(lenience), "ordered")
        first: dict[Text, float] = {}
        for text, chance in found.items():
            first[text[:1]] = first.get(text[:1], 0.0) + chance
        p = case.target.after(())
        assert all(chance <= float(p[token]) / lenience + 1e-12 for (token,), chance in first.items())
        draft, dists = packed([tree for _, tree in case.trees()])
        plan = tree_plan(draft.parents, draft.offsets)
        ours, theirs = (rule.thresholds(draft, plan, dists)[0] for rule in (Lenience(lenience), get_rule("rejection")))
        assert (ours >= theirs - 1e-12).all()  # type: ignore[operator]


def answer(draft: Draft, logits: torch.Tensor, rule: Rule, temperature: float = 1.0) -> tuple[list[int], int]:
    """Path and next token of a draft of one row."""
    count = len(logits)
    one, zero = torch.ones(count), torch.zeros(count, dtype=torch.int32)
    dists = TokenDistributions(logits, *distribution_stats(logits, one * temperature, zero, one, zero.float()))
    rng = Rng(torch.tensor([3]), torch.tensor([5], dtype=torch.int32))
    found = rule(draft, tree_plan(draft.parents, draft.offsets), dists, rng)
    assert int(found.num_accepted) == int((found.path >= 0).sum()) - 1
    return found.path[0][found.path[0] >= 0].tolist(), int(found.next_token)


def test_typical_acceptance_keeps_the_longest_typical_path() -> None:
    """p = (0.7, 0.2, 0.1): entropy 0.80, so the limit is min(epsilon, delta / 2.23)."""
    p = torch.tensor([0.7, 0.2, 0.1])
    limit = 0.3 * exp(float((p * p.log()).sum()))
    assert 0.1 < limit < 0.2
    #        root -> 0, 1, 2; below 1 -> 0; below 2 -> 0 -> 0
    draft = Draft.trees([0], [([0, 0, 1, 2, 0, 0, 0], [-1, 0, 0, 0, 2, 3, 5])])
    logits = p.log().expand(7, 3)
    assert answer(draft, logits, Typical(epsilon=0.5))[0] == [0, 2, 4]  # 2 is not typical, 1 is
    assert answer(draft, logits, Typical(epsilon=0.09))[0] == [0, 3, 5, 6]
    assert answer(draft, logits, Typical(epsilon=0.5, delta=1.0))[0] == [0, 1]
    assert answer(draft, torch.zeros(7, 3), Typical(epsilon=0.5, delta=1.0))[0] == [0]  # strictly above
    tokens = {answer(draft, (p.log() + 30 * torch.eye(3)[at]).expand(7, 3), Typical())[1] for at in range(3)}
    assert tokens == {0, 1, 2}  # drawn from the target's distribution at the last node


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_among_the_likeliest_is_kept(temperature: float) -> None:
    """Logits fall with the id but for two equal ones, 2 and 3, of which the lower counts as the likelier."""
    logits = torch.tensor([4.0, 3.0, 2.0, 2.0, 1.0, -torch.inf]).repeat(5, 1)
    draft = Draft.chains([0], [[0, 1, 2, 0, 3]])
    for among, least, kept in ((1, 0, 0), (2, 0, 1), (3, 0, 3), (4, 0, 4), (1, 2, 3), (1, 4, 4), (2, 2, 3)):
        path, following = answer(draft, logits, TopTokens(among, least), temperature)
        assert path == list(range(kept + 1)) and (following == 0 or temperature > 0)
    barred = Draft.chains([0], [[0, 1, 5, 0]])
    assert answer(barred, logits[:4], TopTokens(6, 3), temperature)[0] == [0, 1]
    tree = Draft.trees([0], [([0, 3, 1, 2, 4, 1], [-1, 0, 0, 1, 2, 2])])
    assert answer(tree, logits[[0] * 6], TopTokens(3), temperature)[0] == [0, 2, 5]
    assert answer(tree, logits[[0] * 6], TopTokens(3, 1), temperature)[0] == [0, 1, 3]
    tokens = {answer(draft, 9 * torch.eye(6)[at].repeat(5, 1), TopTokens(6), temperature)[1] for at in range(6)}
    assert tokens == set(range(6))  # from the target's distribution at the last node


def test_greedy_texts_among_the_likeliest_are_others_and_longer_drafts_are_kept() -> None:
    """The paper's use: the published criterion trades the greedy text for accepted tokens."""
    params = SamplingParams(temperature=0, max_new_tokens=40)
    want = plain_decode(automaton().logits_after, [1, 2], params)
    found = {}
    for rule in ("greedy", "lossy:among=1", "lossy:among=6"):
        engine = Engine(automaton(), NoisyChain([[1, 2, *want]], 0.5, 6, num_draft_tokens=4, seed=1), rule=rule)
        found[rule] = engine.generate([[1, 2]], params)[0]
    assert found["greedy"].tokens == want == found["lossy:among=1"].tokens
    assert found["lossy:among=6"].tokens != want
    assert found["lossy:among=6"].stats.tau > 4 > found["greedy"].stats.tau


def automaton() -> AutomatonTarget:
    return AutomatonTarget(random_logits(11, 6))


@pytest.mark.parametrize("rule", ["lossy", "lossy:lenience=0.4"])
def test_greedy_texts_are_the_target_s(rule: str) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=12)
    want = plain_decode(automaton().logits_after, [1, 2], params)
    drafter = NoisyChain([[1, 2, *want]], 0.8, 6)
    assert Engine(automaton(), drafter, rule=rule).generate([[1, 2]], params)[0].tokens == want


def test_an_engine_says_that_it_is_lossy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "specdec_fast"):
        engine = Engine(automaton(), NoisyTree([[1, 2]], 0.8, 6), rule="lossy")
        handle = engine.generate([[1, 2]], SamplingParams(seed=3, max_new_tokens=12))[0]
    assert len(handle.tokens) == 12 and "rule lossy: texts do not have" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "specdec_fast"):
        Engine(automaton(), rule="replay")
    assert not caplog.text


@dataclass(frozen=True, slots=True)
class Silent(Replay):
    """A rule that is not lossless and has a name that hides it."""

    name: str = "quick"
    lossless: bool = False


def test_nobody_gets_a_lossy_rule_without_asking_for_one() -> None:
    with pytest.raises(ValueError, match="rule quick: got a rule that is not lossless; expected a name that says so"):
        Engine(automaton(), rule=Silent())
    assert Engine(automaton(), rule=Silent(name="lossy:quick")).rule.name == "lossy:quick"
    for needs in (Needs(), Needs(dists=True), Needs(topology="tree"), Needs(topology="tree", dists=True)):
        assert get_rule("best").choose_rule(needs).rule.lossless  # type: ignore[attr-defined]


def test_options_are_part_of_the_name() -> None:
    assert get_rule("lossy") == Typical() and get_rule("lossy").name == "lossy" == Typical().name
    assert get_rule("lossy:lenience=0.25") == Lenience(0.25)
    assert get_rule("lossy:epsilon=0.1,delta=0.2") == Typical(0.1, 0.2)
    assert get_rule("lossy:among=3") == TopTokens(3) and get_rule("lossy:among=3,least=1") == TopTokens(3, 1)
    for name in ("lossy:among=3,least=1", "lossy:lenience=0.25", "lossy:epsilon=0.1,delta=0.2", "lossy:delta=0.3"):
        assert get_rule(name).name == name and not get_rule(name).lossless
    for name, message in (
        ("lossy:lenience=x", "got option 'lenience=x'; expected a number"),
        ("lossy:lenience=0", "lenience: got 0.0; expected a number above 0"),
        ("lossy:epsilon=2", "epsilon: got 2.0"),
        ("lossy:among=0", "among: got 0; expected a whole number, 1 or more"),
        ("lossy:among=2.5", "among: got 2.5; expected a whole number"),
        ("lossy:among=2,least=-1", "least: got -1; expected a whole number, 0 or more"),
        ("lossy:least=1", "expected lenience, epsilon and delta, or among and least"),
        ("lossy:beta=2", "expected lenience, epsilon and delta, or among and least"),
        ("rejection:beta=2", "which has no options"),
    ):
        with pytest.raises(ValueError, match=message):
            get_rule(name)


def test_lenience_wants_chains() -> None:
    assert get_rule("lossy").why_not(Needs(topology="tree")) is None
    with pytest.raises(ValueError, match=r"got drafter .*, which proposes trees"):
        Engine(automaton(), NoisyTree([], 0.8, 6), rule="lossy:lenience=0.5")
    draft, dists = packed([tree for _, tree in TREES[0].trees()])
    with pytest.raises(ValueError, match="got a tree; expected chains"):
        Lenience().thresholds(draft, tree_plan(draft.parents, draft.offsets), dists)
