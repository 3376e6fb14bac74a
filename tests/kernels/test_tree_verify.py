"""tree_verify: both backends against an oracle that knows only parents and tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from oracles.choice_walks import check_walk, drafts, int32
from torch import Tensor

from specdec_kernels import extension, tree_plan, tree_verify, use_backend

BACKENDS = ["reference"] + ([] if extension.missing() else ["cpu"])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(drafts())
def test_walk_equals_the_oracle(
    backend: str, draft: tuple[list[int], list[int], Tensor, Tensor, Tensor | None]
) -> None:
    parents, offsets, tokens, choice, scouts = draft
    plan = tree_plan(int32(parents), int32(offsets))
    depth = 20
    with use_backend(backend):
        path, accepted, following = tree_verify(
            tokens, int32(offsets), plan.first_child, plan.next_sibling, choice, scouts, max_depth=depth
        )
    assert path.shape == (len(offsets) - 1, depth + 1)
    assert (path.dtype, accepted.dtype, following.dtype) == (torch.int32, torch.int32, torch.int64)
    check_walk(draft, path, accepted, following)


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_are_named(backend: str) -> None:
    tokens, choice = torch.tensor([5, 6, 7]), torch.tensor([6, 7, 8])
    offsets, first, following = int32([0, 3]), int32([1, 2, -1]), int32([-1, -1, -1])
    with use_backend(backend):
        assert tree_verify(tokens, offsets, first, following, choice, max_depth=2)[1].tolist() == [2]
        with pytest.raises(ValueError, match=r"row 0 is longer than max_depth = 1.*larger max_depth"):
            tree_verify(tokens, offsets, first, following, choice, max_depth=1)
        with pytest.raises(ValueError, match="first_child"):
            tree_verify(tokens, offsets, int32([1, 1, -1]), following, choice, max_depth=2)
        with pytest.raises(ValueError, match="first_child"):
            tree_verify(tokens, offsets, int32([3, 2, -1]), following, choice, max_depth=2)
        with pytest.raises(ValueError, match=r"node_choice.*torch.int64"):
            tree_verify(tokens, offsets, first, following, choice.int(), max_depth=2)
        with pytest.raises(ValueError, match=r"scouts.*torch.bool"):
            tree_verify(tokens, offsets, first, following, choice, tokens, max_depth=2)
        with pytest.raises(ValueError, match="offsets"):
            tree_verify(tokens, int32([0, 4]), first, following, choice, max_depth=2)
