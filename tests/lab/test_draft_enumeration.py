"""All drafts of a context: their chances add up, and each kind of sibling has the distribution its mark says."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import pytest

from specdec_fast.core.draft import ProposalKind
from specdec_fast.lab.draft_enumeration import CHAINS, POLICIES, PROPOSALS, TREES, all_drafts
from specdec_fast.lab.rational_oracle import RationalModel

FULL = POLICIES["full"]


def models(vocab: int = 3, seed: int = 0) -> tuple[RationalModel, RationalModel]:
    q = RationalModel(vocab, seed + 50)
    return q, RationalModel(vocab, seed + 90)


@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_chances_add_up_to_one(proposal: str, policy: str) -> None:
    q, other = models()
    for shape in CHAINS + TREES:
        for context in ((), (1,), (2, 0)):
            drafts = all_drafts(context, q, other, proposal, (shape,), POLICIES[policy])
            assert sum(tree.chance for tree in drafts) == 1
            for tree in drafts:
                assert all(-1 <= parent < max(node, 1) for node, parent in enumerate(tree.parents))
                if policy == "full" and proposal != "without" and proposal != "hybrid":
                    assert len(tree.tokens) == len(shape)


def test_sampled_siblings_are_independent() -> None:
    q, other = models()
    dist = q.after(())
    found: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for tree in all_drafts((), q, other, "sampled", ((-1, 0, 0),), FULL):
        found[tuple(tree.tokens[1:])] += tree.chance
    assert all(chance == dist[a] * dist[b] for (a, b), chance in found.items())


def test_siblings_without_replacement_differ_and_have_conditional_distributions() -> None:
    q, other = models(4, 2)
    dist = q.after(())
    for tree in all_drafts((), q, other, "without", ((-1, 0, 0),), FULL):
        if len(tree.tokens) == 3:
            a, b = tree.tokens[1:]
            assert a != b and tree.chance == dist[a] * dist[b] / (1 - dist[a])
            assert tree.proposal_kinds[1:] == [ProposalKind.SAMPLED_WITHOUT_EARLIER] * 2


def test_the_hybrid_node_tests_the_sampled_token_first() -> None:
    q, other = models(4, 3)
    dist = q.after(())
    best = max(range(4), key=lambda token: (dist[token], -token))
    for tree in all_drafts((), q, other, "hybrid", ((-1, 0, 0),), FULL):
        if len(tree.tokens) == 3:
            assert tree.proposal_kinds[1:] == [ProposalKind.SAMPLED_WITHOUT_DETERMINISTIC, ProposalKind.DETERMINISTIC]
            assert tree.tokens[2] == best != tree.tokens[1]
            assert tree.chance == dist[tree.tokens[1]] / (1 - dist[best])


def test_policies_do_what_their_names_say() -> None:
    chain, after = (CHAINS[2],), set()
    for seed in range(4):
        q, other = models(3, seed)
        assert {len(tree.tokens) for tree in all_drafts((1,), q, other, "sampled", chain, FULL)} == {4}
        for tree in all_drafts((1,), q, other, "sampled", chain, POLICIES["stop after"]):
            after.add(len(tree.tokens))
            for node in range(1, len(tree.tokens) - 1):
                assert q.after((1, *tree.text[node][:-1]))[tree.tokens[node]] >= Fraction(1, 3)
        for tree in all_drafts((1,), q, other, "sampled", chain, POLICIES["drop"]):
            for node in range(1, len(tree.tokens)):
                assert q.after((1, *tree.text[node][:-1]))[tree.tokens[node]] >= Fraction(2, 5)
    assert len(after) > 1, "it must depend on the tokens"
    shapes = {
        len(tree.tokens)
        for context in ((), (1,), (2,), (1, 1))
        for tree in all_drafts(context, q, other, "deterministic", CHAINS, POLICIES["adaptive"])
    }
    assert len(shapes) > 1
