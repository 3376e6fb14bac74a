"""tree_verify: both backends against an oracle that knows only parents and tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import extension, tree_plan, tree_verify, use_backend

BACKENDS = ["reference"] + ([] if extension.missing() else ["cpu"])


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[int], list[int], Tensor, Tensor, Tensor | None]:
    parents: list[int] = []
    offsets = [0]
    for size in draw(st.lists(st.sampled_from([0, 1, 2, 6, 20]), max_size=4)):
        parents += [-1 if i == 0 else draw(st.integers(max(0, i - 3), i - 1)) for i in range(size)]
        offsets.append(len(parents))
    nodes = len(parents) + draw(st.integers(0, 2))
    parents += [-1] * (nodes - len(parents))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens, choice = (torch.randint(0, 2, (nodes,), generator=g) for _ in range(2))
    scouts = torch.rand(nodes, generator=g) < 0.2 if draw(st.booleans()) else None
    return parents, offsets, tokens, choice, scouts


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
    for row, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        want = []
        node = 0 if end > start else None
        while node is not None:
            want.append(start + node)
            fitting = [
                i
                for i in range(node + 1, end - start)
                if parents[start + i] == node
                and tokens[start + i] == choice[start + node]
                and not (scouts is not None and scouts[start + i])
            ]
            node = fitting[0] if fitting else None
        assert path[row].tolist() == want + [-1] * (depth + 1 - len(want))
        assert accepted[row] == max(len(want) - 1, 0)
        assert following[row] == (choice[want[-1]] if want else -1)


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
