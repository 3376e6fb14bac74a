"""Triton kernels of tree_delta. Shapes are those of `_recurrence/triton_nodes.py`."""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel
from .._recurrence.triton_nodes import Layer, Shape, Trees
from .._recurrence.triton_sequence import run_in_sequence
from .._recurrence.triton_triangle import run_as_triangle

_ALIGNED = (
    "query_ptr", "key_ptr", "value_ptr", "gate_ptr", "state_ptr", "outputs_ptr", "corrections_ptr", "state_stride",
)  # fmt: skip


@kernel(*_ALIGNED)
def solve_nodes(
    query_ptr, key_ptr, value_ptr, gate_ptr, beta_ptr, state_ptr, rows_ptr, lengths_ptr, offsets_ptr, parents_ptr,
    outputs_ptr, corrections_ptr, num_nodes, num_rows, state_stride, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GATE: tl.constexpr,
    TREE: tl.constexpr, ADVANCE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """The delta rule as a triangular system, NODES nodes at a time. Grid: (blocks of columns, heads, requests)."""
    layer = Layer(query_ptr, key_ptr, value_ptr, gate_ptr, beta_ptr, None, state_ptr, outputs_ptr, corrections_ptr)
    trees = Trees(rows_ptr, lengths_ptr, offsets_ptr, parents_ptr, num_nodes, num_rows, state_stride)
    shape: tl.constexpr = Shape(HEADS, GROUPS, KEYS, WIDTH, BLOCK_K, BLOCK_V, GATE, True, TREE)
    run_as_triangle(layer, trees, shape, ADVANCE, NODES)


@kernel(*_ALIGNED)
def follow_nodes(
    query_ptr, key_ptr, value_ptr, gate_ptr, beta_ptr, state_ptr, rows_ptr, lengths_ptr, offsets_ptr, parents_ptr,
    outputs_ptr, corrections_ptr, num_nodes, num_rows, state_stride, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GATE: tl.constexpr,
    TREE: tl.constexpr, ADVANCE: tl.constexpr,
):  # fmt: skip
    """The delta rule node after node. Grid: (blocks of columns, heads, requests)."""
    layer = Layer(query_ptr, key_ptr, value_ptr, gate_ptr, beta_ptr, None, state_ptr, outputs_ptr, corrections_ptr)
    trees = Trees(rows_ptr, lengths_ptr, offsets_ptr, parents_ptr, num_nodes, num_rows, state_stride)
    shape: tl.constexpr = Shape(HEADS, GROUPS, KEYS, WIDTH, BLOCK_K, BLOCK_V, GATE, True, TREE)
    run_in_sequence(layer, trees, shape, ADVANCE)
