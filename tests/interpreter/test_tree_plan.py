"""tree_plan in Triton against the reference: equal, over ragged batches, wide and deep trees, in guarded memory."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.interpreter import guarded

from specdec_kernels import TreePlan, UnsupportedError, tree_plan, use_backend
from specdec_kernels.dispatch import torch_ops
from specdec_kernels.ops.tree_plan import MOST_NODES
from specdec_kernels.ops.tree_plan.launch import MOST_LANES


def both(parents: list[int], offsets: list[int], max_nodes: int) -> tuple[TreePlan, TreePlan]:
    inputs = [torch.tensor(values, dtype=torch.int32) for values in (parents, offsets)]
    with use_backend("reference"):
        want = tree_plan(*inputs, max_nodes=max_nodes)
    with use_backend("triton"):
        return tree_plan(*map(guarded, inputs), max_nodes=max_nodes), want


def assert_equal(got: TreePlan, want: TreePlan) -> None:
    for field in fields(TreePlan):
        assert torch.equal(getattr(got, field.name), getattr(want, field.name)), field.name


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 7, 33, 70]), max_size=4),
    reach=st.sampled_from([1, 3, 100]),
    tail=st.sampled_from([0, 2]),
    source=st.randoms(use_true_random=False),
    spare=st.sampled_from([0, 64]),
)
def test_the_kernel_equals_the_reference(counts: list[int], reach: int, tail: int, source, spare: int) -> None:
    parents, offsets = [], [0]
    for count in counts:
        parents += [source.randint(max(0, i - reach), i - 1) if i else -1 for i in range(count)]
        offsets.append(len(parents))
    assert_equal(*both(parents + [0] * tail, offsets, max([*counts, 1]) + spare))


def test_a_row_of_more_than_a_thousand_nodes() -> None:
    assert_equal(*both([-1, *((i - 1) // 3 for i in range(1, 1030))], [0, 1030], 1030))


def test_more_requests_than_a_tile_holds() -> None:
    """Trees of 0 to 3 nodes: every program goes through all requests, tile by tile."""
    counts = [index % 4 for index in range(2 * MOST_LANES + 5)]
    parents = [node - 1 for count in counts for node in range(count)]
    assert_equal(*both(parents, [0, *itertools.accumulate(counts)], 3))


def test_invalid_parents_end_the_walk() -> None:
    """The host does not check them: kernels do not hang or read out of bounds."""
    inputs = [guarded(torch.tensor(v, dtype=torch.int32)) for v in ([-1, 1, 3, 2, 99, -7], [0, 6])]
    with use_backend("triton"):
        plan = tree_plan(*inputs, max_nodes=6)
    assert plan.depth.tolist() == [0, 0, 0, 1, 0, 0]


def test_more_rows_than_a_block_holds_are_refused_with_the_reason() -> None:
    offsets = torch.zeros(32_769, dtype=torch.int32)
    with use_backend("triton"), pytest.raises(UnsupportedError, match="32768 requests; expected at most 32767"):
        tree_plan(offsets[:0], offsets, max_nodes=1)


def test_words_for_more_nodes_than_exist() -> None:
    parents, offsets = torch.tensor([-1, 0], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    for backend in ("triton", "cpu", "reference"):
        with use_backend(backend):
            assert tree_plan(parents, offsets, max_nodes=65).ancestors.tolist() == [[1, 0, 0], [3, 0, 0]]
    large = torch.tensor([-1, *range(40)], dtype=torch.int32)
    with use_backend("reference"), pytest.raises(ValueError, match="expected at least the nodes of the largest tree"):
        tree_plan(large, torch.tensor([0, 41], dtype=torch.int32), max_nodes=32)


def test_rows_beyond_the_kernel_reach_the_reference_through_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema has no bound, so a batch counts as one row; no launch serves more words than registers hold."""
    parents, offsets = torch.arange(-1, MOST_NODES, dtype=torch.int32), torch.tensor([0, MOST_NODES + 1])
    monkeypatch.setattr(torch_ops, "_find_launch", lambda place: pytest.fail(f"{place} is launched"))
    depth, *_ = torch_ops.LAUNCHES["tree_plan"](parents, offsets.int())
    assert torch.equal(depth, torch.arange(MOST_NODES + 1, dtype=torch.int32))
