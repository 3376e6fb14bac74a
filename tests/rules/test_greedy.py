"""The greedy rule: the target's arg-max from the root, on every small chain and on random trees; temperature
0 only.
"""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from oracles.tree_walk import random_trees, walk

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Needs, Rng
from specdec_fast.rules import get_rule
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import distribution_stats, tree_plan


def greedy_dists(logits: torch.Tensor) -> TokenDistributions:
    rows = logits.shape[0]
    return TokenDistributions(
        logits,
        *distribution_stats(
            logits,
            torch.zeros(rows),
            torch.zeros(rows, dtype=torch.int32),
            torch.ones(rows),
            torch.zeros(rows),
        ),
    )


def rng(rows: int) -> Rng:
    return Rng(torch.arange(rows), torch.zeros(rows, dtype=torch.int32))


@pytest.mark.parametrize("rule", ["greedy", "replay", "rejection"])
@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_chain_of_few_tokens(rule: str, depth: int, vocab: int) -> None:
    """All chains against all sequences of arg-maxima: accepted exactly as far as they agree."""
    chains, choices = list(product(range(vocab), repeat=depth)), list(product(range(vocab), repeat=depth + 1))
    cases = [(chain, choice) for chain in chains for choice in choices]
    draft = Draft.chains(list(range(len(cases))), [[0, *chain] for chain, _ in cases])
    wanted = torch.tensor([choice for _, choice in cases]).flatten()
    logits = torch.nn.functional.one_hot(wanted, vocab).float() + torch.rand(len(wanted), vocab) * 0.5
    plan = tree_plan(draft.parents, draft.offsets)
    answer = get_rule(rule)(draft, plan, greedy_dists(logits), rng(len(cases)))
    agreed = [next((at for at in range(depth) if chain[at] != choice[at]), depth) for chain, choice in cases]
    assert answer.num_accepted.tolist() == agreed
    assert answer.next_token.tolist() == [choice[at] for at, (_, choice) in zip(agreed, cases, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_random_trees_against_the_walk(seed: int) -> None:
    source = random.Random(seed)
    trees, score_only = random_trees(source, rows=6, vocab=3)
    draft = Draft.trees(list(range(6)), trees, score_only=score_only)
    logits = torch.randn(draft.num_nodes, 3, generator=torch.Generator().manual_seed(seed))
    answer = get_rule("greedy")(draft, tree_plan(draft.parents, draft.offsets), greedy_dists(logits), rng(6))
    walk(trees, score_only, logits.argmax(1).tolist(), answer)
    assert answer.node_choice is not None and answer.node_choice.tolist() == logits.argmax(1).tolist()


def test_ties_go_to_the_lower_id() -> None:
    draft = Draft.chains([0], [[0, 2]])
    logits = torch.tensor([[0.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    answer = get_rule("greedy")(draft, tree_plan(draft.parents, draft.offsets), greedy_dists(logits), rng(1))
    assert answer.num_accepted.tolist() == [0] and answer.next_token.tolist() == [1]


def test_requests_with_a_temperature_are_refused() -> None:
    rule = get_rule("greedy")
    message = rule.why_not_sampling(SamplingParams(temperature=0.7))
    assert message is not None and "got temperature 0.7; expected 0" in message
    assert rule.why_not_sampling(SamplingParams(temperature=0)) is None
    assert rule.why_not(Needs(topology="tree")) is None and rule.lossless
