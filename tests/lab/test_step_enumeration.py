"""Steps by enumeration: every cell has its chance, replay's tokens are the target's choices, layouts do not matter."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from specdec_fast.core.draft import ProposalKind
from specdec_fast.lab.draft_enumeration import CHAINS, COUPLED, POLICIES, TREES, DraftTree, all_drafts
from specdec_fast.lab.rational_oracle import RationalModel
from specdec_fast.lab.step_enumeration import choice_cells, depth_first, pack, step_outcomes, threshold_cells
from specdec_fast.rules import get_rule
from specdec_kernels import use_backend

FULL = POLICIES["full"]
TARGET, Q, OTHER = RationalModel(3, 4), RationalModel(3, 54), RationalModel(3, 94)


def test_the_other_layout_is_the_same_tree() -> None:
    q, other = RationalModel(3, 50), RationalModel(3, 90)
    for tree in all_drafts((), q, other, "mixed", (TREES[4],), POLICIES["full"]):
        turned = depth_first(tree)
        assert turned.parents == [-1, 0, 1, 1, 0] and tree.parents == [-1, 0, 0, 1, 1]
        assert sorted(zip(turned.text, turned.proposal_kinds)) == sorted(zip(tree.text, tree.proposal_kinds))
    lone = DraftTree(Fraction(1))
    assert depth_first(lone) == lone and lone.proposal_kinds == [ProposalKind.DETERMINISTIC]


def test_steps_of_one_batch_are_those_of_each_context_alone() -> None:
    drafts = {
        context: all_drafts(context, Q, OTHER, "sampled", (TREES[at],), FULL)
        for at, context in enumerate([(), (1,), (0, 2), (2, 2)])
    }
    with use_backend("reference"):
        for name in ("traversal", "replay"):
            rule = get_rule(name)
            together = step_outcomes(rule, drafts, TARGET.after)
            assert len({len(outcomes) for outcomes, _ in together.values()}) > 1
            for context, trees in drafts.items():
                outcomes, accepted = step_outcomes(rule, {context: trees}, TARGET.after)[context]
                assert together[context][0] == pytest.approx(outcomes, abs=1e-14)
                assert together[context][1] == pytest.approx(accepted, abs=1e-14)
                assert sum(outcomes.values()) == pytest.approx(1, abs=1e-14)


def test_the_cells_of_a_draft_are_all_of_them() -> None:
    """Chances of a draft's cells add up to 1; inner choices are combined, a leaf's distribution stands beside its
    one cell.
    """
    trees = [((), tree) for tree in all_drafts((), Q, OTHER, "sampled", (TREES[3],), FULL)]
    draft, dists = pack(trees, TARGET.after)
    weights = dists.probs().numpy()
    with use_backend("reference"):
        ways = (
            threshold_cells(get_rule("recursive_rejection"), draft, dists),
            choice_cells(get_rule("replay"), draft, dists, weights),
        )
        for found in ways:
            assert np.allclose(np.bincount(found.source, weights=found.chance), 1, atol=1e-14)
            assert len(np.unique(found.source)) == len(trees) < len(found.source)
    inner = (weights > 0).sum(1).reshape(len(trees), -1)[:, :3]  # root and two nodes with a child each
    assert np.array_equal(np.bincount(found.source), inner.prod(1))


@pytest.mark.parametrize("policy", ["full", "stop after", "drop"])
def test_coupled_drafts_are_accepted_more_often_than_sampled_ones(policy: str) -> None:
    """By the noise that they share; the emitted distribution is the same."""
    found = {}
    for proposal, noise in (("sampled", None), (COUPLED, TARGET)):
        trees = all_drafts((1,), Q, OTHER, proposal, (CHAINS[2],), POLICIES[policy], noise)
        found[proposal] = step_outcomes(get_rule("replay"), {(1,): trees}, TARGET.after)[(1,)]
    (drawn, few), (coupled, many) = found["sampled"], found[COUPLED]
    assert many > few + 0.05
    for token in range(3):
        first = [sum(share for text, share in dist.items() if text[0] == token) for dist in (drawn, coupled)]
        assert first == pytest.approx([float(TARGET.after((1,))[token])] * 2, abs=1e-14)


def test_a_coupled_draft_without_its_noise_would_not_keep_the_distribution() -> None:
    """The choice has the distribution that the draft leaves it, not the target's: the enumeration depends on it."""
    trees = all_drafts((), Q, OTHER, COUPLED, (CHAINS[0],), FULL, TARGET)
    for tree in trees:
        assert tree.choice[0] != TARGET.after(()) and tree.choice[1] is None
        tree.chance = Fraction(1, len(trees))
    dist = step_outcomes(get_rule("replay"), {(): trees}, TARGET.after)[()][0]
    first = [sum(share for text, share in dist.items() if text[0] == token) for token in range(3)]
    assert first != pytest.approx([float(weight) for weight in TARGET.after(())], abs=1e-3)
