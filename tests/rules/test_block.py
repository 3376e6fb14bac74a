"""Block verification in exact arithmetic: thresholds, residuals and the choice of the last test that passes, joint over
several steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch
from oracles.chain_batches import batch
from oracles.exact import Text, block_rule, chains, decoded_dist, point_mass, target_dist, text_dist, token_rule
from oracles.rational_models import RationalModel, dists_of
from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Rng
from specdec_fast.rules import get_rule
from specdec_kernels import distribution_stats, tree_plan, use_backend
from specdec_kernels.dispatch import extension

BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])
SHAPES = [(3, 1, 0), (3, 2, 1), (3, 3, 2), (4, 2, 3), (4, 3, 4)]


def rng(rows: int, seed: int = 0) -> Rng:
    return Rng(torch.arange(rows) + 1000 * seed, torch.arange(rows, dtype=torch.int32))


def thresholds(draft: Draft, dists: TokenDistributions) -> tuple[Tensor, Tensor]:
    return get_rule("block").thresholds(draft, tree_plan(draft.parents, draft.offsets), dists)


def by_thresholds(
    found: list[tuple[Fraction, Text]], draft: Draft, dists: TokenDistributions
) -> Iterable[tuple[float, Text]]:
    """Outcomes of one step, from the operator's thresholds and residual weights: the last test that passes counts."""
    accept, rest = (part.double() for part in thresholds(draft, dists))
    for row, (chance, chain) in enumerate(found):
        later_fail, start = float(chance), row * (len(chain) + 1)
        for depth in range(len(chain), -1, -1):
            here = later_fail * float(accept[start + depth])
            if here > 0:
                weights = rest[start + depth] / rest[start + depth].sum()
                for token, weight in enumerate(weights.tolist()):
                    yield here * weight, (*chain[:depth], token)
            later_fail *= 1 - float(accept[start + depth])


def mixed_chains(
    draft: RationalModel, deterministic: RationalModel, context: Text, depth: int
) -> list[tuple[Fraction, Text, list[bool]]]:
    """Chains whose places are sampled or deterministic by a function of the text before them."""
    found: list[tuple[Fraction, Text, list[bool]]] = [(Fraction(1), (), [])]
    for _ in range(depth):
        longer = []
        for chance, chain, sampled in found:
            text = (*context, *chain)
            weights = deterministic.after(text)
            if weights[0] > weights[-1]:
                token = weights.index(max(weights))
                longer.append((chance, (*chain, token), [*sampled, False]))
            else:
                longer.extend((chance * w, (*chain, t), [*sampled, True]) for t, w in enumerate(draft.after(text)) if w)
        found = longer
    return found


@pytest.mark.parametrize(("vocab", "depth", "seed"), SHAPES)
def test_the_rational_oracle_itself_is_lossless(vocab: int, depth: int, seed: int) -> None:
    target = RationalModel(vocab, seed)
    draft = RationalModel(vocab, seed + 50, like=target)
    assert decoded_dist(block_rule, target.after, draft.after, depth, 3) == target_dist(target.after, 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("vocab", "depth", "seed"), SHAPES)
def test_sampled_chains_keep_the_joint_distribution_over_several_steps(
    vocab: int, depth: int, seed: int, dtype: torch.dtype, backend: str
) -> None:
    target = RationalModel(vocab, seed)
    draft = RationalModel(vocab, seed + 50, like=target)

    def step(context: Text) -> Iterable[tuple[float, Text]]:
        found = chains(draft.after, context, depth)
        yield from by_thresholds(found, *batch(found, context, target.after, draft.after, dtype))

    exact = target_dist(target.after, 3)
    with use_backend(backend):
        found = text_dist(step, 3, 1.0)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for text in product(range(vocab), repeat=3):
        assert abs(found.get(text, 0.0) - float(exact.get(text, 0))) < tolerance, text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("vocab", "depth", "seed"), SHAPES)
def test_chains_of_sampled_and_deterministic_tokens_keep_the_joint_distribution(
    vocab: int, depth: int, seed: int, backend: str
) -> None:
    target, choosing = RationalModel(vocab, seed), RationalModel(vocab, seed + 90)
    draft = RationalModel(vocab, seed + 50, like=target)

    def step(context: Text) -> Iterable[tuple[float, Text]]:
        mixed = mixed_chains(draft, choosing, context, depth)
        found = [(chance, chain) for chance, chain, _ in mixed]
        drafted, dists = batch(found, context, target.after, draft.after, torch.float64)
        marks = torch.tensor([mark for *_, sampled in mixed for mark in (False, *sampled)]).to(torch.int8)
        yield from by_thresholds(found, replace(drafted, proposal_kinds=marks), dists)

    exact = target_dist(target.after, 3)
    with use_backend(backend):
        found = text_dist(step, 3, 1.0)
    for text in product(range(vocab), repeat=3):
        assert abs(found.get(text, 0.0) - float(exact.get(text, 0))) < 1e-12, text


def expected(outcomes: Iterable[tuple[Fraction, Text]]) -> Fraction:
    """Expected accepted tokens; the last one of every outcome is not a draft token."""
    return sum((chance * (len(text) - 1) for chance, text in outcomes), Fraction(0))


@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "deterministic"])
@pytest.mark.parametrize(("vocab", "depth", "seed"), SHAPES)
def test_thresholds_and_residuals_are_the_rational_ones(vocab: int, depth: int, seed: int, deterministic: bool) -> None:
    """Against the oracle, outcome by outcome; and at least as much is accepted as by the rejection rule."""
    target = RationalModel(vocab, seed)
    drafting = RationalModel(vocab, seed + 50, like=target)
    if deterministic:
        found = [(Fraction(1), chain) for chain in product(range(vocab), repeat=depth)]
    else:
        found = chains(drafting.after, (), depth)
    gained = Fraction(0)
    for chance, chain in found:
        p = [target.after(chain[:at]) for at in range(depth + 1)]
        q = [point_mass(t, vocab) if deterministic else drafting.after(chain[:at]) for at, t in enumerate(chain)]
        draft, dists = batch(
            [(Fraction(1), chain)], (), target.after, None if deterministic else drafting.after, torch.float64
        )
        want: dict[Text, Fraction] = {}
        got: dict[Text, float] = {}
        for share, text in block_rule(chain, p, q):
            want[text] = want.get(text, Fraction(0)) + share
        for weight, text in by_thresholds([(Fraction(1), chain)], draft, dists):
            got[text] = got.get(text, 0.0) + weight
        assert set(want) <= set(got)
        for text in got:
            assert abs(got[text] - float(want.get(text, 0))) < 1e-12, (chain, text)
        gained += chance * (expected(block_rule(chain, p, q)) - expected(token_rule(chain, p, q)))
    assert gained == 0 if deterministic or depth == 1 else gained >= 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_uniform_that_passes_counts(backend: str) -> None:
    """Every end of every chain: its uniform just below the threshold, later ones just above, earlier ones anything."""
    vocab, depth = 4, 3
    target, drafting = RationalModel(vocab, 4), RationalModel(vocab, 54)
    found = chains(drafting.after, (), depth)
    draft, dists = batch(found, (), target.after, drafting.after, torch.float64)
    accept, rest = thresholds(draft, dists)
    source, cells = random.Random(0), []
    for row, (_, chain) in enumerate(found):
        own = accept[row * (depth + 1) : (row + 1) * (depth + 1)].tolist()
        for end in range(depth + 1):
            if all(h < 1 - 1e-4 for h in own[end + 1 :]) and own[end] > 1e-4:
                early = [source.choice([1e-6, 1 - 1e-6]) for _ in range(max(end - 1, 0))]
                node_uniforms = [0.5] * (end == 0) + ([0.5, *early, own[end] - 1e-5] if end else [])
                cells.append((row, chain, end, [*node_uniforms, *(h + 1e-5 for h in own[end + 1 :])]))
    assert {end for _, _, end, _ in cells} == {0, 1, 2, 3} and len(cells) > 30
    many = [(Fraction(1), chain) for _, chain, *_ in cells]
    draft, dists = batch(many, (), target.after, drafting.after, torch.float64)
    uniforms = torch.tensor([uniform for *_, node_uniforms in cells for uniform in node_uniforms], dtype=torch.float32)
    with use_backend(backend):
        for seed in range(3):
            answer = get_rule("block")(
                draft, tree_plan(draft.parents, draft.offsets), dists, rng(len(cells), seed), uniforms
            )
            assert answer.num_accepted.tolist() == [end for _, _, end, _ in cells]
            for at, (row, _, end, _) in enumerate(cells):
                assert rest[row * (depth + 1) + end, answer.next_token[at]] > 1e-9
                want = [at * (depth + 1) + i if i <= end else -1 for i in range(depth + 1)]
                assert answer.path[at].tolist() == want


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("draft_temperature", [0.0, 1.0])
def test_temperature_zero_is_greedy(backend: str, draft_temperature: float) -> None:
    torch.manual_seed(4)
    rows, depth, vocab = 40, 4, 6
    nodes = rows * (depth + 1)

    def dists(logits: Tensor, temperature: float) -> TokenDistributions:
        none = torch.zeros(len(logits), dtype=torch.int32)
        t, one = torch.full((len(logits),), temperature), torch.ones(len(logits))
        *stats, mass = distribution_stats(logits, t, none, one, one * 0, masses=True)
        return TokenDistributions(logits, *stats, mass=mass)

    target, proposed = dists(torch.randn(nodes, vocab), 0.0), dists(torch.randn(rows * depth, vocab), draft_temperature)
    best = target.tie_id.view(rows, depth + 1)[:, :-1]
    weights = proposed.probs().view(rows, depth, vocab)
    lucky = (torch.rand(rows, depth) < 0.7) & (weights.gather(2, best[..., None].long()).squeeze(2) > 0)
    sampled = torch.multinomial(weights.flatten(0, 1), 1).view(rows, depth)
    chain = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), torch.where(lucky, best.long(), sampled)], 1)
    names = torch.arange(rows * depth).view(rows, depth).tolist()
    with use_backend(backend):
        for draft in (
            Draft.chains(list(range(rows)), chain.tolist(), dist_rows=names, dists=proposed),
            Draft.chains(list(range(rows)), chain.tolist()),
        ):
            plan = tree_plan(draft.parents, draft.offsets)
            want = get_rule("greedy")(draft, plan, target, rng(rows))
            got = get_rule("block")(draft, plan, target, rng(rows))
            assert torch.equal(got.num_accepted, want.num_accepted) and torch.equal(got.next_token, want.next_token)
            assert torch.equal(got.path, want.path) and len(set(want.num_accepted.tolist())) > 2


def test_trees_and_score_only_are_rejected_with_a_reason() -> None:
    dists = dists_of([[Fraction(1, 2), Fraction(1, 2)]] * 3)
    tree = Draft.trees([0], [([0, 1, 1], [-1, 0, 0])])
    chain = replace(Draft.chains([0], [[0, 1, 1]]), score_only=torch.tensor([False, False, True]))
    for draft, message in (
        (tree, "rule block: got a tree; expected chains"),
        (chain, "rule block: got score-only nodes"),
    ):
        with pytest.raises(ValueError, match=message):
            get_rule("block")(draft, tree_plan(draft.parents, draft.offsets), dists, rng(1))
