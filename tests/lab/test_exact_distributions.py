"""Every rule keeps the target's distribution exactly; wrong rules, policies and walks are seen."""

from __future__ import annotations

import pytest
import torch
from oracles.planted_rules import AlteredRule

from specdec_fast.lab.draft_enumeration import CHAINS, COUPLED, DEEPEST, ON_CHAINS, POLICIES, PROPOSALS, TREES
from specdec_fast.lab.exact_distributions import (
    TOLERANCE,
    Case,
    cases_for,
    enumerate_case,
    has_a_dist,
    own_rules,
    run_exact,
    takes_trees,
)
from specdec_fast.lab.rational_oracle import RationalModel, coupled_accepted
from specdec_fast.rules import get_rule
from specdec_kernels.dispatch import extension

RULES = [name for name in own_rules() if has_a_dist(get_rule(name))]
DEEP = CHAINS[2]


@pytest.mark.parametrize("name", RULES)
def test_the_emitted_distribution_is_the_target_s(name: str) -> None:
    found = run_exact([name])
    assert [each for each in found if not each.holds] == []
    assert max(each.drafts for each in found) >= 12, "a draft or two would prove little"
    assert max(each.accepted for each in found) > 0.2


def test_a_context_that_the_target_never_reaches_is_looked_at_when_a_rule_gets_there() -> None:
    """A rule that emits what it must not goes on from there: the lane says by how much it is wrong."""
    uniform = AlteredRule(get_rule("rejection"), residual=lambda found, dists: torch.ones_like(found))
    assert enumerate_case(Case("rejection", "sampled", (CHAINS[0],), "full", seed=1), rule=uniform).error > 0.01


def test_every_distribution_shape_and_policy_is_tried_over_several_steps() -> None:
    for name in RULES:
        rule, cases = get_rule(name), list(cases_for(name))
        policies = set(POLICIES) - ({"drop"} if rule.uses_q else set())
        on_chains = (*ON_CHAINS, COUPLED) if rule.replays else ON_CHAINS
        wanted = {(dist, shape, policy) for dist in on_chains for shape in CHAINS for policy in policies}
        if takes_trees(rule):
            wanted |= {(dist, shape, policy) for dist in PROPOSALS for shape in TREES for policy in policies}
        assert {(case.proposal, shape, case.policy) for case in cases for shape in case.shapes} == wanted
        assert {case.length for case in cases} == {3, 4} and {case.vocab for case in cases} == {3, 4}
        assert all(len(case.shapes) > 1 for case in cases if case.policy == "adaptive")
        deepest = {case.proposal for case in cases if case.vocab == 4 and DEEPEST in case.shapes}
        assert deepest == set(PROPOSALS if takes_trees(rule) else ())
        longest = {case.proposal for case in cases if case.length == 4 and set(case.shapes) & set(TREES)}
        assert longest == set(PROPOSALS if takes_trees(rule) else ())
    assert max(len(shape) - 1 for shape in TREES) == 4 and "rejection" in RULES and "replay" in RULES


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason=str(extension.unavailable_reason()))
@pytest.mark.parametrize("name", RULES)
def test_compiled_rules_have_the_same_exact_distribution(name: str) -> None:
    """The C++ operators in float64, enumerated like the reference."""
    cases = list(cases_for(name, small=True))
    for case in cases[:: 1 + len(cases) // 40]:  # where there are trees, they are most of them
        assert enumerate_case(case, "cpu").error < TOLERANCE


@pytest.mark.parametrize("name", [name for name in RULES if get_rule(name).uses_q])
def test_dropping_sampled_tokens_is_seen(name: str) -> None:
    """An anticipating policy breaks every rule that uses q: the reason why a drafter must verify all that it draws."""
    assert enumerate_case(Case(name, "sampled", (DEEP,), "drop")).error > 0.01


@pytest.mark.parametrize("name", [name for name in RULES if not get_rule(name).replays])
@pytest.mark.parametrize(
    "spoil",
    [
        {"threshold": lambda found: found * 0.99},
        {"uniforms": lambda uniforms: uniforms * 0.97},
        {"residual": lambda found, dists: dists.probs()},
        {"residual": lambda found, dists: found.roll(1, 1)},
    ],
    ids=["threshold", "uniforms", "p for the residual", "residual of another token"],
)
def test_a_spoilt_rule_is_seen(name: str, spoil: dict) -> None:
    case = Case(name, "sampled", (DEEP,), "full", seed=2)
    assert enumerate_case(case).holds
    assert enumerate_case(case, rule=AlteredRule(get_rule(name), **spoil)).error > 1e-6


@pytest.mark.parametrize("name", ["rejection", "replay"])
def test_a_path_that_is_none_is_seen(name: str) -> None:
    def astray(found, draft, dists, rng):
        path = found.path.clone()
        path[found.num_accepted > 0, 1] += 1
        return type(found)(path, found.num_accepted, found.next_token)

    with pytest.raises(AssertionError, match="expected a path of the draft"):
        enumerate_case(Case(name, "sampled", (DEEP,), "full"), rule=AlteredRule(get_rule(name), acceptance=astray))


def test_tokens_that_are_not_the_target_s_choices_are_seen() -> None:
    def another(found, draft, dists, rng):
        return type(found)(found.path, found.num_accepted, (found.next_token + 1) % dists.logits.shape[1])

    with pytest.raises(AssertionError, match="expected them and no others"):
        enumerate_case(
            Case("replay", "sampled", (DEEP,), "full"), rule=AlteredRule(get_rule("replay"), acceptance=another)
        )


def test_thresholds_beyond_one_are_seen() -> None:
    with pytest.raises(AssertionError, match=r"leave \[0, 1\]"):
        wrong = AlteredRule(get_rule("rejection"), threshold=lambda found: found * 2)
        enumerate_case(Case("rejection", "sampled", (DEEP,), "full"), rule=wrong)


def test_greedy_follows_no_distribution_and_is_left_out() -> None:
    assert not has_a_dist(get_rule("greedy")) and "greedy" in own_rules()
    assert run_exact(["greedy"]) == []


def test_float32_distributions_would_not_pass() -> None:
    """The tolerance tells float64 from float32: the enumeration is not merely insensitive."""
    blurred = AlteredRule(get_rule("rejection"), threshold=lambda found: found.to(torch.float32).to(torch.float64))
    assert 1e-12 < enumerate_case(Case("rejection", "sampled", (DEEP,), "full"), rule=blurred).error < 1e-6


@pytest.mark.parametrize("shape", CHAINS)
def test_coupled_chains_of_a_case_know_the_noise(shape: tuple[int, ...]) -> None:
    """As many of them are accepted as the closed form says; drawn without the noise it would be fewer."""
    target = RationalModel(3, 0)
    q = RationalModel(3, 50, like=target)
    wanted = coupled_accepted(target.after, q.after, (), len(shape) - 1)
    coupled, drawn = (enumerate_case(Case("replay", each, (shape,), "full")) for each in (COUPLED, "sampled"))
    assert coupled.holds and coupled.accepted == pytest.approx(float(wanted), abs=1e-12)
    assert drawn.holds and drawn.accepted < coupled.accepted - 0.01
