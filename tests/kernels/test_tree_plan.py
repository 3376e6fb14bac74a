"""tree_plan: both backends against a brute-force walk from every node to its root."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import tree_plan, use_backend
from specdec_kernels.dispatch import extension

BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def forests(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    parents: list[int] = []
    offsets = [0]
    for size in draw(st.lists(st.sampled_from([0, 1, 2, 5, 31, 32, 33, 70]), max_size=5)):
        parents += [-1 if i == 0 else draw(st.integers(0, i - 1)) for i in range(size)]
        offsets.append(len(parents))
    parents += [7] * draw(st.integers(0, 3))  # the tail may hold anything
    return int32(parents), int32(offsets)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(forests())
def test_plan_equals_brute_force(backend: str, forest: tuple[Tensor, Tensor]) -> None:
    parents, offsets = forest
    with use_backend(backend):
        plan = tree_plan(parents, offsets)
    bounds = offsets.tolist()
    widest = max([b - a for a, b in zip(bounds, bounds[1:], strict=False)], default=0)
    assert plan.ancestors.shape == (len(parents), max(1, -(-widest // 32)))
    for part in (plan.depth, plan.row, plan.ancestors, plan.first_child, plan.next_sibling):
        assert part.dtype == torch.int32
    for row, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        own = parents[start:end].tolist()
        for node in range(end - start):
            chain = [node]
            while own[chain[-1]] >= 0:
                chain.append(own[chain[-1]])
            at = start + node
            assert plan.row[at] == row and plan.depth[at] == len(chain) - 1
            words = [int(word) & 0xFFFFFFFF for word in plan.ancestors[at]]
            assert sum(word << (32 * i) for i, word in enumerate(words)) == sum(1 << i for i in chain)
            children = [i for i in range(len(own)) if own[i] == node]
            assert plan.first_child[at] == (start + children[0] if children else -1)
            siblings = [i for i in range(node + 1, len(own)) if own[i] == own[node]]
            assert plan.next_sibling[at] == (start + siblings[0] if siblings and node else -1)
    tail = slice(bounds[-1], None)
    assert (plan.row[tail] == -1).all() and (plan.ancestors[tail] == 0).all()
    assert (plan.depth[tail] == 0).all()
    assert (plan.first_child[tail] == -1).all() and (plan.next_sibling[tail] == -1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("parents", "offsets", "message"),
    [
        ([-1, 1, 0], [0, 3], "row 0, node 1 has parent 1"),
        ([-1, 0, -1, 2], [0, 2, 4], "row 1, node 1 has parent 2"),
        ([0, 0], [0, 2], "row 0, node 0 has parent 0"),
        ([-1, -1], [0, 2], "row 0, node 1 has parent -1"),
        ([-1, -5], [0, 2], "row 0, node 1 has parent -5"),
        ([-1, 0], [0, 3], "offsets"),
        ([-1, 0], [1, 2], "offsets"),
        ([-1, 0], [0, 2, 1], "offsets"),
        ([-1, 0], [], "offsets"),
    ],
)
def test_bad_trees_are_named(backend: str, parents: list[int], offsets: list[int], message: str) -> None:
    with use_backend(backend), pytest.raises(ValueError, match=message):
        tree_plan(int32(parents), int32(offsets))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_are_checked(backend: str) -> None:
    with use_backend(backend):
        with pytest.raises(ValueError, match=r"parents.*torch.int32"):
            tree_plan(torch.tensor([-1]), int32([0, 1]))
        with pytest.raises(ValueError, match=r"offsets.*torch.int32"):
            tree_plan(int32([-1]), torch.tensor([0, 1]))
