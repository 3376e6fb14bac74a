"""Parts of the Triton kernels of recurrent layers: requests, ancestors, gates and records.

Shapes: M = num_nodes packed nodes of B requests, H heads in G groups, K key channels, V columns, R rows of the state.
    query_ptr, key_ptr: [M, G, K]; value_ptr, outputs_ptr: [M, H, V]; beta_ptr: [M, H]
    gate_ptr: logarithms [M, H] or [M, H, K], or steps [M, H, V] that decay_ptr [H, K, V] multiplies
    state_ptr: float32 [R, H, K, V], rows `state_stride` apart; corrections_ptr: float32 [M, H, V]
    rows_ptr, lengths_ptr: int32 [B]; offsets_ptr: int32 [B + 1]; parents_ptr: int32 [M], indices in their trees

Rows that do not exist have no nodes, nodes stay within the M that exist, and a parent that does not precede its node
counts as none. So every loop ends and all accesses are in bounds, whatever these integers are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...triton_shared.tree_links import row_bounds

HEAD: tl.constexpr = tl.constexpr(0)
"""One gate for a head."""
CHANNEL: tl.constexpr = tl.constexpr(1)
"""One gate for each channel of its key."""
ELEMENT: tl.constexpr = tl.constexpr(2)
"""One gate for each element of its state."""
CLEARED: tl.constexpr = tl.constexpr(16)
"""Nodes that `clear_tail` writes at a time."""


class Layer(NamedTuple):
    """Pointers to the inputs, states and results of a layer."""

    query_ptr: Any
    key_ptr: Any
    value_ptr: Any
    gate_ptr: Any
    beta_ptr: Any
    decay_ptr: Any
    state_ptr: Any
    outputs_ptr: Any
    corrections_ptr: Any


class Trees(NamedTuple):
    """Packed trees; numbers of nodes and of rows of the state."""

    rows_ptr: Any
    lengths_ptr: Any
    offsets_ptr: Any
    parents_ptr: Any
    num_nodes: Any
    num_rows: Any
    state_stride: Any


class Shape(NamedTuple):
    """Constants of a kernel. DELTA: the delta rule, else sums of products. TREE: parents are given."""

    HEADS: Any
    GROUPS: Any
    KEYS: Any
    WIDTH: Any
    BLOCK_K: Any
    BLOCK_V: Any
    GATE: Any
    DELTA: Any
    TREE: Any


@triton.jit
def channels_of(shape):
    """Returns the key channels of a program, [BLOCK_K]."""
    BLOCK_K: tl.constexpr = shape.BLOCK_K
    return tl.arange(0, BLOCK_K)


@triton.jit
def columns_of(shape, tile):
    """Returns the columns of a program, [BLOCK_V]."""
    BLOCK_V: tl.constexpr = shape.BLOCK_V
    return tile * BLOCK_V + tl.arange(0, BLOCK_V)


@triton.jit
def locate_request(trees, request):
    """Returns row, first node, number of nodes, end of its nodes, and whether its state is not empty."""
    row = tl.load(trees.rows_ptr + request)
    first, end = row_bounds(trees.offsets_ptr, request, trees.num_nodes)
    known = (row >= 0) & (row < trees.num_rows)
    written = known & (tl.load(trees.lengths_ptr + request) != 0)
    return row.to(tl.int64), first, tl.where(known, end - first, 0), end, written


@triton.jit
def parent_of(trees, first, node, wanted, TREE: tl.constexpr):
    """Returns the parents of nodes of a tree that begins at `first`, as indices in it; -1 at roots."""
    parent = node - 1
    if TREE:
        found = tl.load(trees.parents_ptr + first + node, mask=wanted, other=-1)
        parent = tl.where((found >= 0) & (found < node), found, -1)
    return parent


@triton.jit
def state_place(layer, trees, shape, row, head, tile):
    """Returns the pointers to a tile of the state [BLOCK_K, BLOCK_V], and which of them exist."""
    channel, column = channels_of(shape), columns_of(shape, tile)
    element = (head * shape.KEYS + channel[:, None]) * shape.WIDTH + column[None, :]
    inside = (channel[:, None] < shape.KEYS) & (column[None, :] < shape.WIDTH)
    return layer.state_ptr + row * trees.state_stride + element, inside


@triton.jit
def load_rates(layer, shape, head, tile):
    """Returns the logarithms of factors for a step of 1 [BLOCK_K, BLOCK_V]; 0 for other kinds of gates."""
    if shape.GATE == ELEMENT:
        channel, column = channels_of(shape), columns_of(shape, tile)
        element = (head * shape.KEYS + channel[:, None]) * shape.WIDTH + column[None, :]
        inside = (channel[:, None] < shape.KEYS) & (column[None, :] < shape.WIDTH)
        rates = tl.load(layer.decay_ptr + element, mask=inside, other=0.0).to(tl.float32)
    else:
        rates = 0.0
    return rates


@triton.jit
def load_channels(vectors_ptr, shape, node, head):
    """Returns the query or the key of one node, float32 [BLOCK_K]; `node` is an index on the packed axis."""
    channel = channels_of(shape)
    place = (node.to(tl.int64) * shape.GROUPS + head // (shape.HEADS // shape.GROUPS)) * shape.KEYS + channel
    return tl.load(vectors_ptr + place, mask=channel < shape.KEYS, other=0.0).to(tl.float32)


@triton.jit
def load_columns(values_ptr, shape, node, head, tile):
    """Returns the value, correction or step of one node, float32 [BLOCK_V]."""
    column = columns_of(shape, tile)
    place = (node.to(tl.int64) * shape.HEADS + head) * shape.WIDTH + column
    return tl.load(values_ptr + place, mask=column < shape.WIDTH, other=0.0).to(tl.float32)


@triton.jit
def store_columns(values_ptr, shape, node, head, tile, values):
    """Stores an output or a correction of one node."""
    column = columns_of(shape, tile)
    place = (node.to(tl.int64) * shape.HEADS + head) * shape.WIDTH + column
    tl.store(values_ptr + place, values.to(values_ptr.dtype.element_ty), mask=column < shape.WIDTH)


@triton.jit
def decay_state(layer, shape, state, rates, node, head, tile):
    """Returns a state [BLOCK_K, BLOCK_V] times the gate of one node."""
    at = node.to(tl.int64) * shape.HEADS + head
    if shape.GATE == HEAD:
        decayed = state * tl.exp(tl.load(layer.gate_ptr + at).to(tl.float32))
    elif shape.GATE == CHANNEL:
        channel = channels_of(shape)
        gate = tl.load(layer.gate_ptr + at * shape.KEYS + channel, mask=channel < shape.KEYS, other=0.0)
        decayed = state * tl.exp(gate.to(tl.float32))[:, None]
    else:
        decayed = state * tl.exp(load_columns(layer.gate_ptr, shape, node, head, tile)[None, :] * rates)
    return decayed


@triton.jit
def follow_record(layer, shape, state, rates, node, head, tile, records_ptr):
    """Returns the state after one node, from that of its parent and the record of the node."""
    decayed = decay_state(layer, shape, state, rates, node, head, tile)
    added = load_columns(records_ptr, shape, node, head, tile)
    return decayed + load_channels(layer.key_ptr, shape, node, head)[:, None] * added[None, :]


@triton.jit
def clear_tail(layer, trees, shape, end, head, tile):
    """Writes zeros to the results of the nodes from `end` on, which belong to no request."""
    BLOCK_V: tl.constexpr = shape.BLOCK_V
    column = columns_of(shape, tile)
    for begin in range(end, trees.num_nodes, CLEARED):
        node = begin + tl.arange(0, CLEARED)
        place = (node[:, None].to(tl.int64) * shape.HEADS + head) * shape.WIDTH + column[None, :]
        inside = (node[:, None] < trees.num_nodes) & (column[None, :] < shape.WIDTH)
        zeros = tl.zeros([CLEARED, BLOCK_V], tl.float32)
        tl.store(layer.outputs_ptr + place, zeros.to(layer.outputs_ptr.dtype.element_ty), mask=inside)
        if shape.DELTA:
            tl.store(layer.corrections_ptr + place, zeros, mask=inside)
