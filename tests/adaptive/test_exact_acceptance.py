"""Expected accepted tokens of a draft: means over all drafts are those of the enumeration and of the closed forms."""

from __future__ import annotations

import pytest
import torch
from oracles.planted_rules import AlteredRule

from specdec_fast.adaptive.exact_acceptance import expected_accepted, likeliest_accepted
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.lab.draft_enumeration import CHAINS, POLICIES, TREES, Shape, all_drafts
from specdec_fast.lab.rational_oracle import RationalModel, coupled_accepted
from specdec_fast.lab.step_enumeration import pack, packed_dists, step_outcomes
from specdec_fast.rules import get_rule
from specdec_kernels import use_backend

TARGET = RationalModel(3, 16)
Q, OTHER = RationalModel(3, 66, like=TARGET), RationalModel(3, 93)
WAYS = [
    *((rule, proposal, CHAINS[2]) for rule in ("rejection", "block") for proposal in ("sampled", "mixed")),
    *(
        (rule, proposal, TREES[at])
        for rule in ("recursive_rejection", "traversal")
        for proposal, at in (("sampled", 2), ("without", 4), ("hybrid", 5), ("mixed", 6), ("repeated", 1))
    ),
    ("replay", "deterministic", TREES[5]),
    ("replay", "repeated", TREES[4]),
]


def drafts(proposal: str, shape: Shape, policy: str = "stop after") -> tuple[Draft, TokenDistributions, torch.Tensor]:
    """All drafts after no tokens, the target's distributions, and the chance of each draft."""
    trees = all_drafts((), Q, OTHER, proposal, (shape,), POLICIES[policy])
    chances = torch.tensor([float(tree.chance) for tree in trees], dtype=torch.float64)
    return *pack([((), tree) for tree in trees], TARGET.after), chances


@pytest.mark.parametrize("policy", ["full", "stop after"])
@pytest.mark.parametrize(("name", "proposal", "shape"), WAYS, ids=str)
def test_the_mean_over_all_drafts_is_that_of_all_cells(name: str, proposal: str, shape: Shape, policy: str) -> None:
    with use_backend("reference"):
        rule = get_rule(name)
        draft, dists, chances = drafts(proposal, shape, policy)
        trees = all_drafts((), Q, OTHER, proposal, (shape,), POLICIES[policy])
        exact = step_outcomes(rule, {(): trees}, TARGET.after)[()][1]
        assert float(expected_accepted(rule, draft, dists) @ chances) == pytest.approx(exact, abs=1e-12)
        assert exact > 0.1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_sampled_tokens_stand_for_coupled_ones_of_replay(depth: int) -> None:
    draft, dists, chances = drafts("sampled", CHAINS[depth - 1], "full")
    mean = float(expected_accepted(get_rule("replay"), draft, dists) @ chances)
    assert mean == pytest.approx(float(coupled_accepted(TARGET.after, Q.after, (), depth)), abs=1e-12)
    for name in ("rejection", "block"):
        drawn = expected_accepted(get_rule(name), draft, dists)
        assert float(drawn @ chances) > mean


@pytest.mark.parametrize("shape", [CHAINS[0], TREES[0], TREES[1]])
def test_the_likeliest_tokens_of_one_level_have_their_own_probability(shape: Shape) -> None:
    p, q = TARGET.after(()), Q.after(())
    ranked = sorted(range(3), key=lambda token: (-q[token], token))
    exact = float(sum(p[token] for token in ranked[: len(shape) - 1]))
    for proposal in ("deterministic", "sampled"):
        draft, dists, _ = drafts(proposal, shape, "full")
        assert likeliest_accepted(draft, dists).tolist() == pytest.approx([exact] * len(draft.counts), abs=1e-12)


def test_rows_without_drafts_accept_nothing_and_draft_ids_are_translated() -> None:
    target = packed_dists([[0.1, 0.2, 0.7], [0.1, 0.2, 0.7], [0.1, 0.2, 0.7]])
    q = packed_dists([[0.75, 0.25]])
    few = TokenDistributions(q.logits, *q.stats, token_ids=torch.tensor([2, 0]))
    draft = Draft.chains([0, 1], [[5, 2], [5]], dist_rows=[[0], []], dists=few)
    with use_backend("reference"):
        assert expected_accepted(get_rule("rejection"), draft, target).tolist() == pytest.approx([0.7 / 0.75, 0])
    assert likeliest_accepted(draft, target).tolist() == pytest.approx([0.7, 0])
    both = 1 / (0.75 * 0.1 / 0.7 + 0.0 + 0.25 - 0.75 * 0.1 / 0.7 + 0.75 * 0.2 / 0.7 + 0.75)
    assert expected_accepted(get_rule("replay"), draft, target).tolist() == pytest.approx([both, 0])


def test_what_has_no_expectation_is_refused() -> None:
    draft, dists, _ = drafts("sampled", TREES[0], "full")
    with pytest.raises(ValueError, match="got sampled siblings"):
        expected_accepted(get_rule("replay"), draft, dists)

    class Blind:
        name, replays = "blind", False

    with pytest.raises(ValueError, match="rule blind: got a rule without `thresholds`"):
        expected_accepted(Blind(), draft, dists)  # type: ignore[arg-type]


def test_the_order_of_the_walk_is_the_rule_s_own() -> None:
    """Traversal from the root, or recursive_rejection from the leaves, would have other expectations."""
    draft, dists, chances = drafts("hybrid", TREES[5], "full")
    with use_backend("reference"):
        for name in ("recursive_rejection", "traversal"):
            turned = AlteredRule(get_rule(name))
            turned.from_leaves = not get_rule(name).from_leaves  # type: ignore[attr-defined]
            right, wrong = (float(expected_accepted(rule, draft, dists) @ chances) for rule in (get_rule(name), turned))
            assert abs(right - wrong) > 0.01
