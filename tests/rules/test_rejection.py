"""The rejection rule in exact arithmetic: thresholds, residuals and the walk itself, cell by cell, joint over
several steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch
from oracles.chain_batches import batch
from oracles.exact import Text, chains, decoded_dist, point_mass, residual, target_dist, text_dist, token_rule
from oracles.rational_models import RationalModel, dists_of

import specdec_fast.rules.rejection as token_rule_module
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Rng
from specdec_fast.rules import get_rule
from specdec_kernels import rejection_verify, tree_plan

SHAPES = [(3, 1, 0), (3, 2, 1), (3, 3, 2), (4, 2, 3), (4, 3, 4)]


def thresholds(draft: Draft, dists: TokenDistributions) -> tuple[torch.Tensor, torch.Tensor]:
    return get_rule("rejection").thresholds(draft, tree_plan(draft.parents, draft.offsets), dists)


def by_thresholds(
    found: list[tuple[Fraction, Text]], draft: Draft, dists: TokenDistributions
) -> Iterable[tuple[float, Text]]:
    """Outcomes of one step, from the operator's accept thresholds and residual weights."""
    accept, rest = (part.double() for part in thresholds(draft, dists))
    for row, (chance, chain) in enumerate(found):
        alive, start = float(chance), row * (len(chain) + 1)
        for depth in range(len(chain) + 1):
            stop = 1.0 if depth == len(chain) else 1.0 - float(accept[start + depth + 1])
            weights = rest[start + depth] / rest[start + depth].sum()
            if alive * stop > 0:
                for token, weight in enumerate(weights.tolist()):
                    yield alive * stop * weight, (*chain[:depth], token)
            if depth < len(chain):
                alive *= float(accept[start + depth + 1])


@pytest.mark.parametrize(("vocab", "depth", "seed"), SHAPES)
def test_the_rational_oracle_itself_is_lossless(vocab: int, depth: int, seed: int) -> None:
    target = RationalModel(vocab, seed)
    draft = RationalModel(vocab, seed + 50, like=target)
    assert decoded_dist(token_rule, target.after, draft.after, depth, 3) == target_dist(target.after, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("vocab", "depth", "seed"), SHAPES)
def test_sampled_chains_keep_the_joint_distribution_over_several_steps(
    vocab: int, depth: int, seed: int, dtype: torch.dtype
) -> None:
    target = RationalModel(vocab, seed)
    draft = RationalModel(vocab, seed + 50, like=target)

    def step(context: Text) -> Iterable[tuple[float, Text]]:
        found = chains(draft.after, context, depth)
        yield from by_thresholds(found, *batch(found, context, target.after, draft.after, dtype))

    exact = target_dist(target.after, 3)
    found = text_dist(step, 3, 1.0)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for text in product(range(vocab), repeat=3):
        assert abs(found.get(text, 0.0) - float(exact.get(text, 0))) < tolerance, text


@pytest.mark.parametrize(("vocab", "depth", "seed"), SHAPES)
def test_deterministic_chains_keep_the_joint_distribution_over_several_steps(vocab: int, depth: int, seed: int) -> None:
    """One fixed chain per context, likely and impossible tokens alike."""
    target = RationalModel(vocab, seed)

    def step(context: Text) -> Iterable[tuple[float, Text]]:
        chain = tuple((len(context) + 2 * at + seed) % vocab for at in range(depth))
        found = [(Fraction(1), chain)]
        yield from by_thresholds(found, *batch(found, context, target.after, None, torch.float64))

    exact, found = target_dist(target.after, 3), text_dist(step, 3, 1.0)
    for text in product(range(vocab), repeat=3):
        assert abs(found.get(text, 0.0) - float(exact.get(text, 0))) < 1e-12, text


@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "deterministic"])
@pytest.mark.parametrize(("vocab", "depth", "seed"), SHAPES)
def test_the_path_follows_the_uniforms(
    vocab: int, depth: int, seed: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell of the rule: each stop of each chain, each token that Gumbel noise selects there, with uniforms beside
    the exact threshold.
    """
    target = RationalModel(vocab, seed)
    drafting = RationalModel(vocab, seed + 50, like=target)
    if deterministic:
        found = [(Fraction(1), chain) for chain in product(range(vocab), repeat=depth)]
    else:
        found = chains(drafting.after, (), depth)
    cells: list[tuple[Text, list[float], int, Text]] = []  # chain, uniforms, token favoured by the noise, emitted
    for _, chain in found:
        node_uniforms: list[float] = []
        for at in range(depth + 1):
            p = target.after(chain[:at])
            if at == depth:
                weights, stops = list(p), True
            else:
                q = point_mass(chain[at], vocab) if deterministic else drafting.after(chain[:at])
                accept = min(Fraction(1), p[chain[at]] / q[chain[at]])
                weights, stops = residual(p, q), accept < 1
            if stops:
                below = [] if at == depth else [float(accept) + 1e-5]
                for favoured in range(vocab):
                    heaviest = favoured if weights[favoured] else weights.index(max(weights))
                    rest = [0.5] * (depth - at - len(below))
                    cells.append((chain, [*node_uniforms, *below, *rest], favoured, (*chain[:at], heaviest)))
            if at < depth:
                if accept == 0:
                    break
                node_uniforms.append(float(accept) - 1e-5)
    rows = [(Fraction(1), chain) for chain, *_ in cells]
    draft, dists = batch(rows, (), target.after, None if deterministic else drafting.after, torch.float64)
    uniforms = torch.tensor([uniform for _, own, *_ in cells for uniform in (0.5, *own)], dtype=torch.float32)
    noise = torch.zeros(len(cells), vocab)
    for row, (_, _, favoured, _) in enumerate(cells):
        noise[row, favoured] = 22.0  # about the largest there is; more would make rounding residues win
    gumbel_noise = (torch.zeros(len(cells), 1), noise)
    monkeypatch.setattr(
        token_rule_module,
        "rejection_verify",
        lambda *args, **kwargs: rejection_verify(*args, gumbel_noise=gumbel_noise, **kwargs),
    )
    rng = Rng(torch.zeros(len(cells), dtype=torch.int64), torch.zeros(len(cells), dtype=torch.int32))
    answer = get_rule("rejection")(draft, tree_plan(draft.parents, draft.offsets), dists, rng, uniforms)
    for row, (chain, node_uniforms, favoured, emitted) in enumerate(cells):
        count = int(answer.num_accepted[row])
        got = (*chain[:count], int(answer.next_token[row]))
        weights_differ = len(got) == len(emitted) and got[:-1] == emitted[:-1] and favoured != emitted[-1]
        assert got == emitted or weights_differ, (chain, node_uniforms, favoured, got, emitted)
        if weights_differ:  # the favoured token has no weight: anything else that has some may win
            p = target.after(chain[:count])
            q = [Fraction(0)] * vocab
            if count < depth:
                q = point_mass(chain[count], vocab) if deterministic else drafting.after(chain[:count])
            assert residual(p, q)[got[-1]] > 0
        start = row * (depth + 1)
        assert answer.path[row].tolist() == [start + at if at <= count else -1 for at in range(depth + 1)]


def test_thresholds_and_residuals_are_the_rational_ones() -> None:
    target, drafting = RationalModel(4, 9), RationalModel(4, 59)
    found = chains(drafting.after, (), 2)
    draft, dists = batch(found, (), target.after, drafting.after, torch.float64)
    accept, rest = thresholds(draft, dists)
    for row, (_, chain) in enumerate(found):
        for depth, token in enumerate(chain):
            p, q = target.after(chain[:depth]), drafting.after(chain[:depth])
            assert abs(float(accept[3 * row + depth + 1]) - float(min(Fraction(1), p[token] / q[token]))) < 1e-13
            want, got = residual(p, q), rest[3 * row + depth]
            total = float(sum(want)) or 1.0
            if sum(want):
                assert torch.allclose(
                    got / got.sum(), torch.tensor([float(w) / total for w in want]).double(), atol=1e-12
                )


def test_uniforms_are_compared_strictly() -> None:
    """A token that the target forbids is rejected even by a uniform of zero."""
    dists = dists_of([[Fraction(0), Fraction(1)], [Fraction(1, 2), Fraction(1, 2)]])
    draft = Draft.chains([0], [[0, 0]], dist_rows=[[0]], dists=dists_of([[Fraction(1, 2), Fraction(1, 2)]]))
    for seed in range(20):
        rng = Rng(torch.tensor([seed]), torch.tensor([3], dtype=torch.int32))
        answer = get_rule("rejection")(draft, tree_plan(draft.parents, draft.offsets), dists, rng, torch.zeros(2))
        assert answer.num_accepted.tolist() == [0] and answer.next_token.tolist() == [1]


def test_trees_are_rejected_with_a_reason() -> None:
    draft = Draft.trees([0], [([0, 1, 1], [-1, 0, 0])])
    with pytest.raises(ValueError, match="got a tree; expected chains"):
        get_rule("rejection")(
            draft,
            tree_plan(draft.parents, draft.offsets),
            dists_of([[Fraction(1, 2), Fraction(1, 2)]] * 3),
            Rng(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)),
        )


def test_score_only_are_rejected_with_a_reason() -> None:
    """They would be taken for proposals."""
    dists = dists_of([[Fraction(1, 2), Fraction(1, 2)]] * 2)
    draft = replace(Draft.chains([0], [[0, 1]]), score_only=torch.tensor([False, True]))
    rng = Rng(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="rule rejection: got score-only nodes"):
        get_rule("rejection")(draft, tree_plan(draft.parents, draft.offsets), dists, rng)
