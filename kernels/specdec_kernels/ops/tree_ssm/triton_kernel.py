"""Triton kernels of tree_ssm. Shapes are those of `_recurrence/triton_nodes.py`."""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel
from .._recurrence.triton_nodes import Layer, Shape, Trees
from .._recurrence.triton_sequence import run_in_sequence
from .._recurrence.triton_triangle import run_as_triangle


@kernel("query_ptr", "key_ptr", "value_ptr", "gate_ptr", "state_ptr", "outputs_ptr", "state_stride")
def solve_nodes(
    query_ptr, key_ptr, value_ptr, gate_ptr, state_ptr, rows_ptr, lengths_ptr, offsets_ptr, parents_ptr, outputs_ptr,
    num_nodes, num_rows, state_stride, HEADS: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GATE: tl.constexpr, TREE: tl.constexpr,
    ADVANCE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """The recurrence as a triangular system, NODES nodes at a time. Grid: (blocks of columns, heads, requests)."""
    layer = Layer(query_ptr, key_ptr, value_ptr, gate_ptr, None, None, state_ptr, outputs_ptr, None)
    trees = Trees(rows_ptr, lengths_ptr, offsets_ptr, parents_ptr, num_nodes, num_rows, state_stride)
    shape: tl.constexpr = Shape(HEADS, GROUPS, KEYS, WIDTH, BLOCK_K, BLOCK_V, GATE, False, TREE)
    run_as_triangle(layer, trees, shape, ADVANCE, NODES)


@kernel("query_ptr", "key_ptr", "value_ptr", "gate_ptr", "decay_ptr", "state_ptr", "outputs_ptr", "state_stride")
def follow_nodes(
    query_ptr, key_ptr, value_ptr, gate_ptr, decay_ptr, state_ptr, rows_ptr, lengths_ptr, offsets_ptr, parents_ptr,
    outputs_ptr, num_nodes, num_rows, state_stride, HEADS: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GATE: tl.constexpr, TREE: tl.constexpr,
    ADVANCE: tl.constexpr,
):  # fmt: skip
    """The recurrence node after node. Grid: (blocks of columns, heads, requests)."""
    layer = Layer(query_ptr, key_ptr, value_ptr, gate_ptr, None, decay_ptr, state_ptr, outputs_ptr, None)
    trees = Trees(rows_ptr, lengths_ptr, offsets_ptr, parents_ptr, num_nodes, num_rows, state_stride)
    shape: tl.constexpr = Shape(HEADS, GROUPS, KEYS, WIDTH, BLOCK_K, BLOCK_V, GATE, False, TREE)
    run_in_sequence(layer, trees, shape, ADVANCE)
