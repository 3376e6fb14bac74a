"""Token recycling: the tree of ranks, what is learnt from a step, and what is shared between requests."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.draft import Draft
from specdec_fast.drafters import make_drafter
from specdec_fast.drafters.recycling import tree_of_ranks
from specdec_fast.interfaces import Acceptance, Budget, TargetOutput
from specdec_fast.state import DecodeState

VOCAB = 12
NOTHING = Acceptance(torch.zeros(0), torch.zeros(0), torch.zeros(0))


def recycling(**options: Any) -> Any:
    return get_drafter("recycling")(**options)


def paths_of(levels: Any) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for level in levels:
        paths += [(*paths[parent], rank) for parent, rank in level]
    return paths[1:]


@pytest.mark.parametrize(("top", "depth"), [(1, 4), (3, 2), (8, 6)])
def test_the_tree_of_ranks_grows_by_its_likeliest_node(top: int, depth: int) -> None:
    trees = [set(paths_of(tree_of_ranks(nodes, top, depth))) for nodes in range(13)]
    most = sum(top**level for level in range(1, depth + 1))
    assert [len(tree) for tree in trees] == [min(nodes, most) for nodes in range(13)]
    for small, large in pairwise(trees):
        assert small <= large
    for path in trees[-1]:
        assert len(path) <= depth and max(path) < top
        assert len(path) == 1 or path[:-1] in trees[-1], "closed under prefixes"
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in trees[-1], "an elder sibling comes first"


def learn(drafter: Any, rows: list[int], chains: list[list[int]], logits: torch.Tensor) -> None:
    drafter.observe(None, Draft.chains(rows, chains), NOTHING, TargetOutput(logits))


def logits_for(successors: list[list[int]]) -> torch.Tensor:
    """Rows of logits whose largest entries are these tokens, in order."""
    rows = torch.zeros(len(successors), VOCAB)
    for row, tokens in zip(rows, successors, strict=True):
        for at, token in enumerate(tokens):
            row[token] = 9.0 - at
    return rows


@torch.inference_mode()
def tree(drafter: Any, text: list[int], limit: int) -> tuple[list[int], list[int]]:
    state = DecodeState(1, 99)
    row = state.join(text, SamplingParams(seed=1), len(text), ())
    drafter.begin(state, [row], None)
    draft = drafter.propose(state, [row], Budget([limit]), state.rng([row]))
    draft.check(VOCAB)
    return draft.tokens.tolist(), draft.parents.tolist()


def test_successors_fill_the_tree_level_by_level() -> None:
    drafter = recycling(top_k=2, depth=3, num_draft_tokens=20)
    assert tree(drafter, [1], 9) == ([1], [-1]), "before anything was seen"
    learn(drafter, [0], [[1, 2, 3]], logits_for([[2, 3], [4, 1], [5, 6]]))
    want = ([1, 2, 3, 4, 1, 5, 6, 2, 3], [-1, 0, 0, 1, 1, 2, 2, 4, 4])
    assert tree(drafter, [1], 20) == want, "4, 5 and 6 have no successors yet"
    assert tree(drafter, [7], 20) == ([7], [-1]) and tree(drafter, [1], 0) == ([1], [-1])
    assert tree(drafter, [8, 2], 2) == ([2, 4], [-1, 0]), "the second of two nodes would be below 4"


def test_the_last_node_of_a_token_counts() -> None:
    drafter = recycling(top_k=2)
    learn(drafter, [0], [[1, 1, 2, 1]], logits_for([[3, 4], [5, 6], [7, 8], [9, 10]]))
    assert drafter.successors(0)[1].tolist() == [9, 10] and drafter.successors(0)[2].tolist() == [7, 8]
    learn(drafter, [0], [[1]], logits_for([[0, 11]]))
    assert drafter.successors(0)[1].tolist() == [0, 11], "token 0 is a token like any other"
    assert drafter.successors(0)[3].tolist() == [-1, -1]


def test_requests_learn_apart_or_together() -> None:
    apart, together = recycling(top_k=1), recycling(top_k=1, shared=True)
    for drafter in (apart, together):
        learn(drafter, [0, 1], [[1], [2]], logits_for([[3], [4]]))
    assert apart.successors(0)[:3, 0].tolist() == [-1, 3, -1]
    assert apart.successors(1)[:3, 0].tolist() == [-1, -1, 4]
    assert together.successors(0)[:3, 0].tolist() == [-1, 3, 4] == together.successors(5)[:3, 0].tolist()
    apart.release([0, 7])
    together.release([0])
    assert apart.successors(0) is None and together.successors(0) is not None


def test_it_is_shared_by_default_where_that_is_exact() -> None:
    def made(prefers: str, **options: Any) -> bool:
        target = AutomatonTarget(random_logits(5, 8))
        return bool(make_drafter("recycling", options, target=target, prefers=prefers).shared)  # type: ignore[attr-defined]

    assert made("coupled") and made("greedy") and not made("drawn")
    assert made("drawn", shared=True) and not made("coupled", shared=False)


def test_an_oracle_is_drafted_to_its_full_depth() -> None:
    """A target whose next token depends on the newest alone: once a cycle was seen it is drafted whole."""
    cycle = [3]
    while len(cycle) < 9:
        cycle.append((cycle[-1] * 5 + 1) % VOCAB)
    drafter = recycling(num_draft_tokens=6, top_k=1, shared=True)
    for token, following in pairwise(cycle):
        learn(drafter, [0], [[token]], logits_for([[following]]))
    assert tree(drafter, [3], 6) == (cycle[:7], [-1, 0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("first_order", [True, False])
def test_in_an_engine_it_changes_nothing_and_costs_no_pass(first_order: bool) -> None:
    """Where the newest token says all, a loop is learnt and accepted; where it does not, the drafts mislead."""
    transitions = torch.arange(VOCAB).expand(VOCAB, VOCAB) if first_order else None

    def target() -> AutomatonTarget:
        return AutomatonTarget(random_logits(VOCAB, VOCAB, seed=2), transitions, max_length=128)

    params = SamplingParams(temperature=0, max_new_tokens=80)
    plain = Engine(target()).generate([[1], [2, 3, 4]], params)
    handles = Engine(target(), recycling(shared=True)).generate([[1], [2, 3, 4]], params)
    assert [handle.tokens for handle in handles] == [handle.tokens for handle in plain]
    assert all(a.stats.steps <= b.stats.steps for a, b in zip(handles, plain, strict=True))
    assert not first_order or min(handle.stats.tau for handle in handles) > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens, depth: got 0, 6; expected at least 1"),
        ({"depth": 0}, "num_draft_tokens, depth: got 12, 0"),
        ({"top_k": 0}, "top_k: got 0; expected 1 to 8"),
        ({"top_k": 9}, "top_k: got 9"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"recycling {message}"):
        recycling(**options)
