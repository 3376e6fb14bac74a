"""exact_match_verify in Triton: the path of the definition, ragged rows, score-only nodes, 64 levels, duplicate
siblings.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from oracles.choice_walks import check_walk, drafts, int32
from oracles.interpreter import guarded
from torch import Tensor

from specdec_kernels import exact_match_verify, tree_plan, use_backend


@settings(max_examples=60, deadline=None, derandomize=True)
@given(drafts())
def test_walk_equals_the_oracle(draft: tuple[list[int], list[int], Tensor, Tensor, Tensor | None]) -> None:
    parents, offsets, tokens, choice, score_only = draft
    plan = tree_plan(int32(parents), int32(offsets))
    given_parts = (tokens, int32(offsets), plan.first_child, plan.next_sibling, choice, score_only)
    with use_backend("triton"):
        result = exact_match_verify(*(part if part is None else guarded(part) for part in given_parts), max_depth=20)
    check_walk(draft, *result)
    assert [part.dtype for part in result] == [torch.int32, torch.int32, torch.int64]


def test_a_path_of_64_and_duplicate_siblings() -> None:
    """Every node has two children of the same token, and the earlier one is on the path."""
    tokens = torch.tensor([0, *(1 + level // 2 for level in range(128))])
    choice = torch.tensor([1, *(2 + level // 2 for level in range(128))])
    parents = [-1, *(0 if node <= 2 else 2 * ((node - 1) // 2) - 1 for node in range(1, 129))]
    plan = tree_plan(int32(parents), int32([0, 129]))
    with use_backend("triton"):
        path, accepted, following = exact_match_verify(
            tokens, int32([0, 129]), plan.first_child, plan.next_sibling, choice, max_depth=64
        )
    assert accepted.tolist() == [64] and following.tolist() == [65]
    assert path.tolist() == [[0, *range(1, 129, 2)]]


def test_a_path_that_does_not_fit_is_named() -> None:
    first, following = int32([1, 2, -1]), int32([-1, -1, -1])
    links = (torch.tensor([5, 6, 7]), int32([0, 3]), first, following, torch.tensor([6, 7, 8]))
    with (
        use_backend("triton"),
        pytest.raises(ValueError, match=r"row 0 is longer than max_depth = 1.*larger max_depth"),
    ):
        exact_match_verify(*links, max_depth=1)
