"""Triton kernels of tree_conv.

Shapes: M = num_nodes packed nodes of B = num_requests requests, C channels, R rows of windows.
    inputs_ptr, outputs_ptr: [M, C]; weight_ptr: [C, HELD + 1]; bias_ptr: [C]
    window_ptr: [R, HELD, C], rows `window_stride` apart; rows_ptr, lengths_ptr: int32 [B]; offsets_ptr: int32 [B + 1]
    parents_ptr: int32 [M], indices in their trees
A node of no request, or of a row that does not exist, has zeros. A parent that does not precede its node is none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.jit import kernel
from ...triton_shared.tree_links import row_bounds
from .._recurrence.triton_windows import store_window

REQUESTS = tl.constexpr(32)
"""Requests that nodes are compared with at a time."""


@triton.jit
def find_requests(offsets_ptr, node, num_requests):
    """Returns the requests that nodes of the packed axis belong to; `num_requests` for nodes behind all."""
    request = node * 0
    for begin in range(0, num_requests, REQUESTS):
        other = begin + tl.arange(0, REQUESTS)
        end = tl.load(offsets_ptr + other + 1, mask=other < num_requests, other=2147483647)
        request += tl.sum((end[None, :] <= node[:, None]).to(tl.int32), 1)
    return tl.minimum(request, num_requests)


@kernel("inputs_ptr", "window_ptr", "outputs_ptr", "window_stride")
def convolve(
    inputs_ptr, weight_ptr, bias_ptr, window_ptr, rows_ptr, lengths_ptr, offsets_ptr, parents_ptr, outputs_ptr,
    num_requests, num_nodes, num_rows, window_stride, CHANNELS: tl.constexpr, HELD: tl.constexpr, BIAS: tl.constexpr,
    SILU: tl.constexpr, TREE: tl.constexpr, NODES: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Convolves NODES nodes of any requests, for BLOCK_C channels. Grid: (blocks of nodes, blocks of channels).

    A node adds up its own input, then those of its ancestors, then its window from the newest input on. So its bits
    depend on its ancestors only.
    """
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    fits = channel < CHANNELS
    request = find_requests(offsets_ptr, node, num_requests)
    known = (node < num_nodes) & (request < num_requests)
    first = tl.load(offsets_ptr + request, mask=known & (request > 0), other=0)
    known = known & (first >= 0) & (first <= node)
    row = tl.load(rows_ptr + request, mask=known, other=-1)
    known = known & (row >= 0) & (row < num_rows)
    written = known & (tl.load(lengths_ptr + request, mask=known, other=0) != 0)
    row_ptr = window_ptr + row.to(tl.int64) * window_stride
    total = tl.zeros([NODES, BLOCK_C], tl.float32)
    up = tl.where(known, node - first, -1)
    beyond = node * 0
    for step in tl.static_range(HELD + 1):
        inside = known & (up >= 0)
        reads = written & (up < 0)
        place = (first + up).to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        own = tl.load(inputs_ptr + place, mask=inside[:, None] & fits[None, :], other=0.0).to(tl.float32)
        older = (HELD - 1 - beyond)[:, None] * CHANNELS + channel[None, :]
        kept = tl.load(row_ptr[:, None] + older, mask=reads[:, None] & fits[None, :], other=0.0).to(tl.float32)
        tap = tl.load(weight_ptr + channel * (HELD + 1) + (HELD - step), mask=fits, other=0.0).to(tl.float32)
        total += tl.where(inside[:, None], own, kept) * tap[None, :]
        beyond += (up < 0).to(tl.int32)
        above = up - 1
        if TREE:
            parent = tl.load(parents_ptr + first + up, mask=inside, other=-1)
            above = tl.where((parent >= 0) & (parent < up), parent, -1)
        up = tl.maximum(above, -1)
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=fits, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1 + tl.exp(-total))
    total = tl.where(known[:, None], total, 0.0)
    place = node.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(
        outputs_ptr + place, total.to(outputs_ptr.dtype.element_ty),
        mask=(node < num_nodes)[:, None] & fits[None, :],
    )  # fmt: skip


@kernel("inputs_ptr", "window_ptr", "window_stride")
def advance_windows(
    window_ptr, inputs_ptr, rows_ptr, lengths_ptr, offsets_ptr, num_nodes, num_rows, window_stride,
    CHANNELS: tl.constexpr, HELD: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Moves the window of one request behind its chain, for BLOCK_C channels. Grid: (blocks of channels, requests)."""
    block, request = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + request)
    first, end = row_bounds(offsets_ptr, request, num_nodes)
    count = tl.where((row >= 0) & (row < num_rows), end - first, 0)
    place = tl.arange(0, BLOCK_W) + count - HELD
    written = tl.load(lengths_ptr + request) != 0
    node = tl.where(place >= 0, first + place, -1)
    store_window(
        window_ptr + row.to(tl.int64) * window_stride, inputs_ptr, node, count, written, block, CHANNELS, HELD, BLOCK_W,
        BLOCK_C,
    )  # fmt: skip
