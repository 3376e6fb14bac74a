"""The lab's rational oracle agrees with the one of the tests, with sums by hand and with brute force."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from oracles.distributions import dist
from oracles.exact import chains, text_dist, token_rule
from oracles.exact import target_dist as other_target_dist

from specdec_fast.lab.rational_oracle import (
    RationalModel,
    block_accepted,
    coupled_accepted,
    coupled_choice,
    dist_of_logits,
    geometric_tokens,
    overlap,
    rejection_accepted,
    target_dist,
    transport_bound,
)
from specdec_kernels import distribution_stats


@pytest.mark.parametrize("seed", range(4))
def test_distributions_of_texts_agree_with_the_tests_oracle(seed: int) -> None:
    model = RationalModel(3, seed)
    assert target_dist(model.after, 3) == other_target_dist(model.after, 3)
    assert sum(target_dist(model.after, 3).values()) == 1


def test_models_have_zeros_points_and_equal_rows() -> None:
    target = RationalModel(3, 0)
    draft = RationalModel(3, 50, like=target)
    texts = [text for length in range(4) for text in product(range(3), repeat=length)]
    dists = [target.after(text) for text in texts]
    assert any(0 in one for one in dists) and any(1 in one for one in dists)
    assert any(target.after(text) == draft.after(text) for text in texts)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_accepted_tokens_are_those_of_the_rule_in_rational_arithmetic(seed: int, depth: int) -> None:
    target = RationalModel(3, seed)
    q = RationalModel(3, seed + 50, like=target)
    found = Fraction(0)
    for chance, chain in chains(q.after, (), depth):
        p = [target.after(chain[:at]) for at in range(depth + 1)]
        dists = [q.after(chain[:at]) for at in range(depth)]
        found += sum(chance * share * (len(emitted) - 1) for share, emitted in token_rule(chain, p, dists))
    assert rejection_accepted(target.after, q.after, (), depth) == found
    assert block_accepted(target.after, q.after, (), depth) >= found
    assert depth > 1 or block_accepted(target.after, q.after, (), depth) == found
    assert text_dist(lambda context: [(w, (t,)) for t, w in enumerate(target.after(context)) if w], 1, Fraction(1))


def test_the_geometric_series() -> None:
    assert geometric_tokens(Fraction(1, 2), 2) == Fraction(7, 4)
    assert geometric_tokens(1, 4) == 5 and geometric_tokens(0, 4) == 1


@pytest.mark.parametrize("seed", range(12))
def test_coupled_choices_are_a_joint_distribution_with_the_right_margins(seed: int) -> None:
    """Zeros, ties and equal distributions among them; the diagonal is the closed form."""
    p = RationalModel(3 + seed % 2, seed)
    q = RationalModel(p.vocab, seed + 50, like=p).after(())
    target, drafted = p.after(()), [token for token, weight in enumerate(q) if weight]
    given = {token: coupled_choice(target, q, token) for token in drafted}
    assert all(sum(choice) == 1 and min(choice) >= 0 for choice in given.values())
    for token, weight in enumerate(target):
        assert sum(q[each] * given[each][token] for each in drafted) == weight
    both = sum(q[token] * given[token][token] for token in drafted)
    assert both == coupled_accepted(lambda text: target, lambda text: q, (), 1) <= overlap(target, q)


def test_coupled_choices_are_those_of_gumbel_noise() -> None:
    p, q = np.array([0.5, 0.1, 0.3, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    noise = np.random.default_rng(1).gumbel(size=(400_000, 4))
    draft, target = (np.log(q) + noise).argmax(1), (np.log(p) + noise).argmax(1)
    for token in range(4):
        seen = np.bincount(target[draft == token], minlength=4) / (draft == token).sum()
        exact = coupled_choice([Fraction(each).limit_denominator(10) for each in p],
                               [Fraction(each).limit_denominator(10) for each in q], token)  # fmt: skip
        assert np.allclose(seen, [float(each) for each in exact], atol=5 / np.sqrt((draft == token).sum()) / 2)


def test_the_transport_bound_of_one_sampled_token_is_the_overlap() -> None:
    for seed in range(8):
        p, q = RationalModel(4, seed).after(()), RationalModel(4, seed + 50).after(())
        sets = {frozenset([token]): weight for token, weight in enumerate(q) if weight}
        assert transport_bound(p, sets) == overlap(p, q)
    even = [Fraction(1, 2), Fraction(1, 2)]
    assert transport_bound(even, {frozenset([0, 1]): Fraction(1)}) == 1
    assert transport_bound(even, {frozenset([0]): Fraction(1)}) == Fraction(1, 2)


@pytest.mark.parametrize("settings", [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 7, 0.9, 0.1)])
def test_processed_distributions_agree_with_the_tests_oracle(settings: tuple[float, int, float, float]) -> None:
    logits = np.round(np.random.default_rng(0).standard_normal(40) * 3) / 2  # with ties
    assert np.allclose(dist_of_logits(logits, *settings), dist(logits, *settings), atol=1e-15)
    assert dist_of_logits(logits, 0.0).argmax() == logits.argmax()


@pytest.mark.parametrize("top_p", [0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.9])
def test_top_p_at_ties_is_that_of_the_operator(top_p: float) -> None:
    level = torch.zeros(1, 10)
    no_top_k, off = torch.tensor([0], dtype=torch.int32), torch.tensor([0.0])
    found = distribution_stats(level, torch.tensor([1.0]), no_top_k, torch.tensor([top_p]), off)
    assert (dist_of_logits(level[0].numpy(), 1.0, 0, top_p) > 0).sum() == int(found[3]) + 1


@pytest.mark.parametrize("bad", [[float("nan"), 0.0], [float("inf"), 0.0], [float("-inf")] * 2])
def test_rows_that_are_no_distribution_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"NaN, \+inf or no finite"):
        dist_of_logits(np.array(bad), 1.0)
