"""Chunked attention by windows over moved positions: Triton against the reference, with and without a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.packed_trees import Shape, build

from specdec_fast.interfaces import Slots
from specdec_fast.targets.chunked_attention import ancestors_and_depth_of_chunks
from specdec_kernels import plan_for, tree_attention, use_backend

pytest.importorskip("triton")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", [1, 24, 64, 70, 200])
def test_chunks_equal_the_reference(chunk: int, causal: bool) -> None:
    """Rows in front of a border of chunks, on it and behind it."""
    case = build(Shape([40, 5, 0, 9], [60, 64, 3, 199], deep=True, tail=3, seed=chunk))
    nodes = torch.arange(len(case.query), dtype=torch.int32)
    row = (torch.searchsorted(case.offsets, nodes, right=True) - 1).clamp(max=3)
    depth = nodes - case.offsets[row] if causal else case.depth
    tree = (None, None) if causal else (case.ancestors, case.depth)
    at = Slots(case.page_table, case.lengths, case.offsets, nodes.long(), (case.lengths[row] + depth).long(), *tree)
    ancestors, moved = ancestors_and_depth_of_chunks(at, chunk)
    options: dict[str, Any] = {"scale": 0.125, "window": chunk}
    with use_backend(tree_attention="reference"):
        want = tree_attention(*case.cache, ancestors, moved, **options)
    with use_backend("triton"):
        plan = plan_for(*case.cache[:2], *case.cache[3:], ancestors, window=chunk)
        for given in ({}, {"batch_invariant": True}, {"plan": plan}):
            got = tree_attention(*case.cache, ancestors, moved, **options, **given)
            assert float((got - want).abs().max()) < 3e-6
