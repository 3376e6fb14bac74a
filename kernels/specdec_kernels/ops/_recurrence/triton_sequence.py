"""The recurrence node after node, in the order of the references.

The state is read once. It stays in registers from a node to its first child; at any other child it is made again from
the committed state and the records on the path. So the bits of a node depend on its ancestors only, and a state has the
bits of `state_commit`. This takes launches without fused products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_nodes import (
    clear_tail,
    decay_state,
    follow_record,
    load_channels,
    load_columns,
    load_rates,
    locate_request,
    parent_of,
    state_place,
    store_columns,
)


@triton.jit
def replay_to(layer, trees, shape, state, rates, first, last, head, tile, records_ptr):
    """Returns the state after node `last` of a tree, from the committed state; -1 stands for no node."""
    steps = 0
    up = last
    while up >= 0:
        up = parent_of(trees, first, up, True, shape.TREE)
        steps += 1
    for step in range(steps):
        node = last
        for _ in range(steps - 1 - step):
            node = parent_of(trees, first, node, True, shape.TREE)
        state = follow_record(layer, shape, state, rates, first + node, head, tile, records_ptr)
    return state


@triton.jit
def run_in_sequence(layer, trees, shape, ADVANCE: tl.constexpr):
    """Computes the nodes of one request in one head, for BLOCK_V columns.

    Grid: (blocks of columns, heads, requests).
    """
    tile, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, first, count, end, written = locate_request(trees, request)
    place, inside = state_place(layer, trees, shape, row, head, tile)
    committed = tl.load(place, mask=inside & written & (count > 0), other=0.0)
    rates = load_rates(layer, shape, head, tile)
    records_ptr = layer.value_ptr
    if shape.DELTA:
        records_ptr = layer.corrections_ptr
    state = committed
    for at in range(count):
        node = first + at
        if shape.TREE:
            parent = parent_of(trees, first, at, True, shape.TREE)
            if parent + 1 != at:
                tl.debug_barrier()  # other threads wrote the records
                state = replay_to(layer, trees, shape, committed, rates, first, parent, head, tile, records_ptr)
        added = load_columns(layer.value_ptr, shape, node, head, tile)
        state = decay_state(layer, shape, state, rates, node, head, tile)
        key = load_channels(layer.key_ptr, shape, node, head)
        if shape.DELTA:
            rate = tl.load(layer.beta_ptr + node.to(tl.int64) * shape.HEADS + head).to(tl.float32)
            added = (added - tl.sum(state * key[:, None], 0)) * rate
            store_columns(layer.corrections_ptr, shape, node, head, tile, added)
        state += key[:, None] * added[None, :]
        output = tl.sum(state * load_channels(layer.query_ptr, shape, node, head)[:, None], 0)
        store_columns(layer.outputs_ptr, shape, node, head, tile, output)
    if ADVANCE:
        tl.store(place, state, mask=inside & (count > 0))
    if request == tl.num_programs(2) - 1:
        clear_tail(layer, trees, shape, end, head, tile)
