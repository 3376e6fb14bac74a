"""The replay rule: every node's choice is the keyed draw at its own absolute position, and the walk follows
it.
"""

from __future__ import annotations

import random

import pytest
import torch
from oracles.plain_decoding import replay_choice
from oracles.tree_walk import random_trees, walk

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng
from specdec_fast.rules import get_rule
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import distribution_stats, tree_plan


def verify(draft: Draft, logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> Acceptance:
    plan = tree_plan(draft.parents, draft.offsets)
    own = [params[row] for row in plan.row.tolist()]
    dists = TokenDistributions(
        logits,
        *distribution_stats(
            logits,
            torch.tensor([p.temperature for p in own], dtype=torch.float32),
            torch.tensor([p.top_k for p in own], dtype=torch.int32),
            torch.tensor([p.top_p for p in own], dtype=torch.float32),
            torch.tensor([p.min_p for p in own], dtype=torch.float32),
        ),
    )
    rng = Rng(torch.tensor([p.seed for p in params]), torch.tensor(positions, dtype=torch.int32))
    return get_rule("replay")(draft, plan, dists, rng)


def some_params(source: random.Random, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=source.choice([0.0, 0.5, 1.0, 2.0]),
        top_k=source.choice([0, 3]),
        top_p=source.choice([1.0, 0.8]),
        min_p=source.choice([0.0, 0.1]),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_of_every_node_is_the_keyed_draw_there(seed: int) -> None:
    source = random.Random(seed)
    rows = source.choice([1, 2, 7])
    trees, score_only = random_trees(source, rows, vocab=5)
    draft = Draft.trees(list(range(rows)), trees, score_only=score_only)
    logits = torch.randn(draft.num_nodes, 5, generator=torch.Generator().manual_seed(seed))
    params = [some_params(source, source.randrange(2**63)) for _ in range(rows)]
    positions = [source.randrange(4000) for _ in range(rows)]
    answer = verify(draft, logits, params, positions)
    plan = tree_plan(draft.parents, draft.offsets)
    want = [
        replay_choice(logits[node].double().numpy(), params[row], positions[row] + depth + 1)
        for node, (row, depth) in enumerate(zip(plan.row.tolist(), plan.depth.tolist(), strict=True))
    ]
    assert answer.node_choice is not None and answer.node_choice.tolist() == want
    walk(trees, score_only, want, answer)


def test_the_answer_does_not_depend_on_the_place_in_the_batch() -> None:
    source = random.Random(1)
    trees, _ = random_trees(source, 5, vocab=4)
    params = [some_params(source, seed) for seed in range(5)]
    logits = [
        torch.randn(len(tokens), 4, generator=torch.Generator().manual_seed(at)) for at, (tokens, _) in enumerate(trees)
    ]

    def answers(order: list[int]) -> dict[int, tuple[int, int]]:
        draft = Draft.trees(order, [trees[at] for at in order])
        found = verify(
            draft,
            torch.cat([logits[at] for at in order]),
            [params[at] for at in order],
            [9 + at for at in order],
        )
        return {at: (int(found.num_accepted[place]), int(found.next_token[place])) for place, at in enumerate(order)}

    alone = {at: answers([at])[at] for at in range(5)}
    assert answers([0, 1, 2, 3, 4]) == alone and answers([3, 1, 4, 0, 2]) == alone


def test_the_same_context_at_another_position_draws_anew() -> None:
    draft = Draft.chains([0], [[1]])
    found = set()
    for position in range(40):
        answer = verify(draft, torch.zeros(1, 8), [SamplingParams(seed=3)], [position])
        found.add(int(answer.next_token[0]))
    assert len(found) > 5


def test_it_takes_everything() -> None:
    rule = get_rule("replay")
    assert rule.why_not(Needs(topology="tree", dists=True)) is None and rule.lossless
    assert rule.why_not_sampling(SamplingParams(temperature=1.3)) is None
