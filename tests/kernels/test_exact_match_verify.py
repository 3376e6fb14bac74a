"""exact_match_verify: both backends against an oracle that knows only parents and tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from oracles.choice_walks import check_walk, drafts, int32
from torch import Tensor

from specdec_kernels import exact_match_verify, tree_plan, use_backend
from specdec_kernels.dispatch import extension

BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(drafts())
def test_walk_equals_the_oracle(
    backend: str, draft: tuple[list[int], list[int], Tensor, Tensor, Tensor | None]
) -> None:
    parents, offsets, tokens, choice, score_only = draft
    plan = tree_plan(int32(parents), int32(offsets))
    depth = 20
    with use_backend(backend):
        path, accepted, following = exact_match_verify(
            tokens, int32(offsets), plan.first_child, plan.next_sibling, choice, score_only, max_depth=depth
        )
    assert path.shape == (len(offsets) - 1, depth + 1)
    assert (path.dtype, accepted.dtype, following.dtype) == (torch.int32, torch.int32, torch.int64)
    check_walk(draft, path, accepted, following)


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_are_named(backend: str) -> None:
    tokens, choice = torch.tensor([5, 6, 7]), torch.tensor([6, 7, 8])
    offsets, first, following = int32([0, 3]), int32([1, 2, -1]), int32([-1, -1, -1])
    with use_backend(backend):
        assert exact_match_verify(tokens, offsets, first, following, choice, max_depth=2)[1].tolist() == [2]
        with pytest.raises(ValueError, match=r"row 0 is longer than max_depth = 1.*larger max_depth"):
            exact_match_verify(tokens, offsets, first, following, choice, max_depth=1)
        with pytest.raises(ValueError, match="first_child"):
            exact_match_verify(tokens, offsets, int32([1, 1, -1]), following, choice, max_depth=2)
        with pytest.raises(ValueError, match="first_child"):
            exact_match_verify(tokens, offsets, int32([3, 2, -1]), following, choice, max_depth=2)
        with pytest.raises(ValueError, match=r"node_choice.*torch.int64"):
            exact_match_verify(tokens, offsets, first, following, choice.int(), max_depth=2)
        with pytest.raises(ValueError, match=r"score_only.*torch.bool"):
            exact_match_verify(tokens, offsets, first, following, choice, tokens, max_depth=2)
        with pytest.raises(ValueError, match="offsets"):
            exact_match_verify(tokens, int32([0, 4]), first, following, choice, max_depth=2)
