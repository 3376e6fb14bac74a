"""The target's distributions: every node has its request's parameters, with the minimum length at its own depth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.distributions import dist

from specdec_fast.core.draft import Draft
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.sampling.sampling_tensors import SamplingTable
from specdec_fast.sampling.target_distributions import target_distributions
from specdec_kernels import tree_plan


def table(*rows: SamplingParams, prompt: int = 4, stop_ids: tuple[int, ...] = ()) -> SamplingTable:
    made = SamplingTable(torch.device("cpu"))
    for row, params in enumerate(rows):
        made.set(row, params.with_seed(), prompt, (*stop_ids, *params.stop_token_ids))
    return made


def test_every_node_gets_the_distribution_of_its_row() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=2.0, top_p=0.75),
        SamplingParams(temperature=1.0, min_p=0.25),
    ]
    made = table(*params).pack([2, 0, 3, 1])
    draft = Draft.trees(
        [2, 0, 3, 1], [([1, 2, 3], [-1, 0, 0]), ([1], [-1]), ([1, 2], [-1, 0]), ([1, 2, 3, 4], [-1, 0, 1, 1])]
    )
    logits = torch.randn(10, 9, generator=torch.Generator().manual_seed(3)) * 2
    dists = target_distributions(
        draft,
        tree_plan(draft.parents, draft.offsets),
        logits.clone(),
        made,
        torch.zeros(4, dtype=torch.int32),
    )
    of_node = [2, 2, 2, 0, 3, 3, 1, 1, 1, 1]
    for node, row in enumerate(of_node):
        own = params[row]
        want = dist(logits[node].numpy(), own.temperature, own.top_k, own.top_p, own.min_p)
        assert np.allclose(dists.probs()[node].numpy(), want, atol=1e-6), (node, row)


@pytest.mark.parametrize("minimum", [0, 1, 3])
def test_ends_are_forbidden_before_the_minimum_at_each_node_s_own_depth(minimum: int) -> None:
    """With a prompt of 4 tokens and the root at position 4, a node at depth d decides new token d + 2."""
    made = table(SamplingParams(min_new_tokens=minimum), SamplingParams(), stop_ids=(2, 5)).pack([0, 1])
    draft = Draft.trees([0, 1], [([1, 1, 1, 1], [-1, 0, 1, 0]), ([1], [-1])])
    logits = torch.zeros(5, 8)
    dists = target_distributions(
        draft, tree_plan(draft.parents, draft.offsets), logits, made, torch.tensor([4, 4], dtype=torch.int32)
    )
    weights = dists.probs()
    for node, depth in enumerate([0, 1, 2, 1]):
        free = depth + 2 > minimum
        assert (weights[node, [2, 5]] > 0).all() == free, (node, minimum)
        assert abs(float(weights[node].sum()) - 1) < 1e-6
    assert (weights[4] > 0).all()


def test_end_ids_beyond_the_logits_are_ignored() -> None:
    made = table(SamplingParams(min_new_tokens=2), stop_ids=(3, 99)).pack([0])
    draft = Draft.chains([0], [[1]])
    plan = tree_plan(draft.parents, draft.offsets)
    weights = target_distributions(draft, plan, torch.zeros(1, 8), made, torch.tensor([3], dtype=torch.int32)).probs()
    assert float(weights[0, 3]) == 0 and int((weights > 0).sum()) == 7
