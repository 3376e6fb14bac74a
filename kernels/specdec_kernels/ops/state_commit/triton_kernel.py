"""Triton kernels of state_commit and window_commit.

Shapes: those of `_recurrence/triton_nodes.py`, and:
    path_ptr: int32 [B, path_width], nodes on the packed axis, padded with -1
    window_ptr: [R, HELD, C], rows `window_stride` apart; inputs_ptr: [M, C], of the same dtype
Rows and nodes that do not exist change nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.jit import kernel
from .._recurrence.triton_nodes import Layer, Shape, Trees, follow_record, load_rates, state_place
from .._recurrence.triton_windows import store_window

STEPS = tl.constexpr(32)
"""Entries of a path that are read side by side."""


@kernel("key_ptr", "value_ptr", "gate_ptr", "decay_ptr", "state_ptr", "state_stride")
def replay_path(
    state_ptr, key_ptr, value_ptr, gate_ptr, decay_ptr, rows_ptr, lengths_ptr, path_ptr, num_nodes, num_rows,
    path_width, state_stride, HEADS: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Replays the records of one path in one head, for BLOCK_V columns. Grid: (blocks of columns, heads, requests).

    The state is read once and written once, with the bits of `run_in_sequence`.
    """
    tile, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer = Layer(None, key_ptr, value_ptr, gate_ptr, None, decay_ptr, state_ptr, None, None)
    trees = Trees(rows_ptr, lengths_ptr, None, None, num_nodes, num_rows, state_stride)
    shape: tl.constexpr = Shape(HEADS, GROUPS, KEYS, WIDTH, BLOCK_K, BLOCK_V, GATE, False, False)
    row = tl.load(rows_ptr + request)
    known = (row >= 0) & (row < num_rows)
    written = known & (tl.load(lengths_ptr + request) != 0)
    place, inside = state_place(layer, trees, shape, row.to(tl.int64), head, tile)
    state = tl.load(place, mask=inside & written, other=0.0)
    rates = load_rates(layer, shape, head, tile)
    kept = 0
    for step in range(path_width):
        node = tl.load(path_ptr + request.to(tl.int64) * path_width + step)
        if (node >= 0) & (node < num_nodes):
            state = follow_record(layer, shape, state, rates, node, head, tile, value_ptr)
            kept += 1
    tl.store(place, state, mask=inside & known & (kept > 0))


@triton.jit
def count_kept(path_ptr, path_width, num_nodes):
    """Returns how many nodes a path keeps."""
    kept = 0
    for first in range(0, path_width, STEPS):
        step = first + tl.arange(0, STEPS)
        node = tl.load(path_ptr + step, mask=step < path_width, other=-1)
        kept += tl.sum(((node >= 0) & (node < num_nodes)).to(tl.int32), 0)
    return kept


@triton.jit
def find_kept(path_ptr, path_width, num_nodes, wanted):
    """Returns the nodes that a path keeps at some places, counted from 0; -1 where there is none."""
    found = wanted * 0 - 1
    before = 0
    for first in range(0, path_width, STEPS):
        step = first + tl.arange(0, STEPS)
        node = tl.load(path_ptr + step, mask=step < path_width, other=-1)
        kept = ((node >= 0) & (node < num_nodes)).to(tl.int32)
        place = before + tl.cumsum(kept, 0) - 1
        here = (kept[None, :] > 0) & (place[None, :] == wanted[:, None])
        found = tl.maximum(found, tl.max(tl.where(here, node[None, :], -1), 1))
        before += tl.sum(kept, 0)
    return found


@kernel("window_ptr", "inputs_ptr", "window_stride")
def move_windows(
    window_ptr, inputs_ptr, rows_ptr, lengths_ptr, path_ptr, num_nodes, num_rows, path_width, window_stride,
    CHANNELS: tl.constexpr, HELD: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Moves the window of one request behind its path, for BLOCK_C channels. Grid: (blocks of channels, requests)."""
    block, request = tl.program_id(0), tl.program_id(1)
    path_ptr += request.to(tl.int64) * path_width
    kept = count_kept(path_ptr, path_width, num_nodes)
    node = find_kept(path_ptr, path_width, num_nodes, tl.arange(0, BLOCK_W) + kept - HELD)
    row = tl.load(rows_ptr + request)
    kept = tl.where((row >= 0) & (row < num_rows), kept, 0)
    written = tl.load(lengths_ptr + request) != 0
    store_window(
        window_ptr + row.to(tl.int64) * window_stride, inputs_ptr, node, kept, written, block, CHANNELS, HELD, BLOCK_W,
        BLOCK_C,
    )  # fmt: skip
