"""The recurrence as a triangular system: the committed state is read once for all nodes of a tile.

With S the committed state, F_i the product of the gates of node i and its ancestors, and D_ij the product of the gates
behind ancestor j up to i (1 for j = i), the corrections of the delta rule solve
    u_i = beta_i (v_i - F_i k_i S - sum over ancestors j of (k_i k_j) D_ij u_j),
and the outputs are F_i q_i S + sum over j = i and its ancestors of (q_i k_j) D_ij u_j. Without the delta rule u is v.
Parents precede their children, so the system is lower triangular. A gate of each channel belongs into the products of
keys and queries.

Factors are products along the way up from each node, never quotients, nor differences of sums. So they neither overflow
nor cancel. A tree of more than NODES nodes adds the products with earlier tiles, whose corrections are already stored.
A prompt goes on from tile to tile with the state itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_nodes import CHANNEL, clear_tail, columns_of, locate_request, parent_of

PRECISION: tl.constexpr = tl.constexpr("tf32x3")
"""Three products in place of one, near float32."""
PART_OF_KEY: tl.constexpr = tl.constexpr(16)
"""Key channels that a program holds at a time. More parts than one are fetched ahead."""
WIDE_PART: tl.constexpr = tl.constexpr(32)
"""The same with a gate of each channel: each part takes a way up through the tree."""


@triton.jit
def load_vectors(vectors_ptr, shape, first, node, wanted, head, channel):
    """Returns some channels of queries or keys of a tree, float32 [nodes, channels]; 0 for nodes not wanted."""
    group = head // (shape.HEADS // shape.GROUPS)
    place = ((first + node[:, None]).to(tl.int64) * shape.GROUPS + group) * shape.KEYS + channel[None, :]
    mask = wanted[:, None] & (channel[None, :] < shape.KEYS)
    return tl.load(vectors_ptr + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_gates(layer, shape, first, node, wanted, head, channel):
    """Returns the gates of nodes of a tree, [nodes] or [nodes, channels]; 1 for those that are not wanted."""
    at = (first + node).to(tl.int64) * shape.HEADS + head
    if shape.GATE == CHANNEL:
        mask = wanted[:, None] & (channel[None, :] < shape.KEYS)
        gate = tl.load(layer.gate_ptr + at[:, None] * shape.KEYS + channel[None, :], mask=mask, other=0.0)
    else:
        gate = tl.load(layer.gate_ptr + at, mask=wanted, other=0.0)
    return tl.exp(gate.to(tl.float32))


@triton.jit
def column_places(shape, first, node, wanted, head, tile):
    """Returns offsets of the values of nodes of a tree, [nodes, BLOCK_V], and which of them are wanted and exist."""
    column = columns_of(shape, tile)
    place = ((first + node[:, None]).to(tl.int64) * shape.HEADS + head) * shape.WIDTH + column[None, :]
    return place, wanted[:, None] & (column[None, :] < shape.WIDTH)


@triton.jit
def state_part(layer, trees, shape, row, head, tile, channel):
    """Returns the pointers to some channels of the state, [channels, BLOCK_V], and which of them exist."""
    column = columns_of(shape, tile)
    element = (head * shape.KEYS + channel[:, None]) * shape.WIDTH + column[None, :]
    inside = (channel[:, None] < shape.KEYS) & (column[None, :] < shape.WIDTH)
    return layer.state_ptr + row * trees.state_stride + element, inside


@triton.jit
def climb(layer, trees, shape, first, node, known, begin, head, NODES: tl.constexpr):
    """Returns the factors D from each node to its ancestors in the tile at `begin`, [NODES, NODES].

    The second result is the product of all gates on the way up, down to the first node of that tile.
    """
    lane = tl.arange(0, NODES)
    decay = tl.zeros([NODES, NODES], tl.float32)
    factor = tl.full([NODES], 1.0, tl.float32)
    up = tl.where(known, node, -1)
    going = up >= begin
    while tl.max(going.to(tl.int32), 0) > 0:
        here = going[:, None] & (up[:, None] == (begin + lane)[None, :])
        decay = tl.where(here, factor[:, None], decay)
        factor *= load_gates(layer, shape, first, up, going, head, lane)
        up = tl.where(going, parent_of(trees, first, up, going, shape.TREE), up)
        going = up >= begin
    return decay, factor


@triton.jit
def climb_channels(
    layer, trees, shape, query, key, first, node, known, begin, head, channel, NODES: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Returns products of keys and of queries with the keys of ancestors in the tile at `begin`, for some channels.

    These are [NODES, NODES]. The third result has all gates on the way up, as that of `climb`, [NODES, PART].
    """
    lane = tl.arange(0, NODES)
    keys = tl.zeros([NODES, NODES], tl.float32)
    queries = tl.zeros([NODES, NODES], tl.float32)
    factor = tl.full([NODES, PART], 1.0, tl.float32)
    up = tl.where(known, node, -1)
    going = up >= begin
    while tl.max(going.to(tl.int32), 0) > 0:
        here = going[:, None] & (up[:, None] == (begin + lane)[None, :])
        other = load_vectors(layer.key_ptr, shape, first, up, going, head, channel) * factor
        keys = tl.where(here, tl.sum(key * other, 1)[:, None], keys)
        queries = tl.where(here, tl.sum(query * other, 1)[:, None], queries)
        factor *= load_gates(layer, shape, first, up, going, head, channel)
        up = tl.where(going, parent_of(trees, first, up, going, shape.TREE), up)
        going = up >= begin
    return keys, queries, factor


@triton.jit
def meet_tile(
    layer, trees, shape, row, read, output, first, node, known, begin, count, reads, filled, head, tile,
    NODES: tl.constexpr,
):  # fmt: skip
    """Returns what nodes meet in the tile at `begin`, and adds what they read from the state if `reads`.

    The results are the products of keys and of queries with the keys of ancestors there, [NODES, NODES], and what keys
    and queries read from the state, [NODES, BLOCK_V]. A state that is not `filled` counts as zeros.
    """
    BLOCK_K: tl.constexpr = shape.BLOCK_K
    PART: tl.constexpr = min(BLOCK_K, WIDE_PART if shape.GATE == CHANNEL else PART_OF_KEY)
    keys = tl.zeros([NODES, NODES], tl.float32)
    queries = tl.zeros([NODES, NODES], tl.float32)
    other = begin + tl.arange(0, NODES)
    if shape.GATE != CHANNEL:
        decay, factor = climb(layer, trees, shape, first, node, known, begin, head, NODES)
    for start in range(0, BLOCK_K, PART):
        channel = start + tl.arange(0, PART)
        query = load_vectors(layer.query_ptr, shape, first, node, known, head, channel)
        key = load_vectors(layer.key_ptr, shape, first, node, known, head, channel)
        if reads:
            place, inside = state_part(layer, trees, shape, row, head, tile, channel)
            state = tl.load(place, mask=inside & filled, other=0.0)
        if shape.GATE == CHANNEL:
            more_keys, more_queries, factors = climb_channels(
                layer, trees, shape, query, key, first, node, known, begin, head, channel, NODES, PART
            )
            keys += more_keys
            queries += more_queries
            query *= factors
            key *= factors
        else:
            theirs = tl.trans(load_vectors(layer.key_ptr, shape, first, other, other < count, head, channel))
            if shape.DELTA:
                keys = tl.dot(key, theirs, keys, input_precision=PRECISION)
            queries = tl.dot(query, theirs, queries, input_precision=PRECISION)
        if reads:
            output = tl.dot(query, state, output, input_precision=PRECISION)
            if shape.DELTA:
                read = tl.dot(key, state, read, input_precision=PRECISION)
    if shape.GATE != CHANNEL:
        keys *= decay
        queries *= decay
        if reads:
            output *= factor[:, None]
            read *= factor[:, None]
    return keys, queries, read, output


@triton.jit
def advance_state(
    layer, trees, shape, row, added, first, node, end, filled, head, tile, NODES: tl.constexpr
):  # fmt: skip
    """Moves the state of a row behind the nodes of a tile, the last of which precedes `end`."""
    BLOCK_K: tl.constexpr = shape.BLOCK_K
    PART: tl.constexpr = min(BLOCK_K, WIDE_PART if shape.GATE == CHANNEL else PART_OF_KEY)
    for start in range(0, BLOCK_K, PART):
        channel = start + tl.arange(0, PART)
        key = load_vectors(layer.key_ptr, shape, first, node, node < end, head, channel)
        own = load_gates(layer, shape, first, node, node < end, head, channel)
        behind = load_gates(layer, shape, first, node + 1, node + 1 < end, head, channel)
        place, inside = state_part(layer, trees, shape, row, head, tile, channel)
        state = tl.load(place, mask=inside & filled, other=0.0)
        whole = tl.reduce(own, 0, multiply)
        if shape.GATE == CHANNEL:
            state *= whole[:, None]
            weighted = key * tl.cumprod(behind, 0, reverse=True)
        else:
            state *= whole
            weighted = key * tl.cumprod(behind, 0, reverse=True)[:, None]
        tl.store(place, tl.dot(tl.trans(weighted), added, state, input_precision=PRECISION), mask=inside)


@triton.jit
def multiply(a, b):
    """Returns a product, for reductions."""
    return a * b


@triton.jit
def run_as_triangle(layer, trees, shape, ADVANCE: tl.constexpr, NODES: tl.constexpr):
    """Computes the nodes of one request in one head, for BLOCK_V columns.

    Grid: (blocks of columns, heads, requests).
    """
    BLOCK_V: tl.constexpr = shape.BLOCK_V
    tile, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, first, count, end, written = locate_request(trees, request)
    lane = tl.arange(0, NODES)
    for start in range(0, count, NODES):
        node = start + lane
        known = node < count
        filled = written
        front = 0
        if ADVANCE:  # the state holds all earlier tiles
            filled = written | (start > 0)
            front = start
        read = tl.zeros([NODES, BLOCK_V], tl.float32)
        output = tl.zeros([NODES, BLOCK_V], tl.float32)
        keys, queries, read, output = meet_tile(
            layer, trees, shape, row, read, output, first, node, known, front, count, True, filled, head, tile, NODES
        )
        at, mask = column_places(shape, first, node, known, head, tile)
        if not ADVANCE:
            for begin in range(NODES, start + NODES, NODES):  # products with the tile before this one
                place, inside = column_places(shape, first, begin - NODES + lane, known | True, head, tile)
                if shape.DELTA:
                    other = tl.load(layer.corrections_ptr + place, mask=inside, other=0.0)
                    read = tl.dot(keys, other, read, input_precision=PRECISION)
                else:
                    other = tl.load(layer.value_ptr + place, mask=inside, other=0.0).to(tl.float32)
                output = tl.dot(queries, other, output, input_precision=PRECISION)
                keys, queries, read, output = meet_tile(
                    layer, trees, shape, row, read, output, first, node, known, begin, count, False, filled, head,
                    tile, NODES,
                )  # fmt: skip
        added = tl.load(layer.value_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if shape.DELTA:
            rate = tl.load(layer.beta_ptr + (first + node).to(tl.int64) * shape.HEADS + head, mask=known, other=0.0)
            rate = rate.to(tl.float32)[:, None]
            added = (added - read) * rate
            earlier = tl.where(lane[:, None] > lane[None, :], keys * rate, 0.0)
            for one in range(tl.minimum(count - start, NODES) - 1):
                own = tl.sum(tl.where(lane[:, None] == one, added, 0.0), 0)
                weight = tl.sum(tl.where(lane[None, :] == one, earlier, 0.0), 1)
                added -= weight[:, None] * own[None, :]
            tl.store(layer.corrections_ptr + at, added, mask=mask)
        output = tl.dot(queries, added, output, input_precision=PRECISION)
        tl.store(layer.outputs_ptr + at, output.to(layer.outputs_ptr.dtype.element_ty), mask=mask)
        if ADVANCE:
            last = tl.minimum(start + NODES, count)
            tl.debug_barrier()  # other threads have read the state that these overwrite
            advance_state(layer, trees, shape, row, added, first, node, last, filled, head, tile, NODES)
        tl.debug_barrier()  # other threads read what these have stored
    if request == tl.num_programs(2) - 1:
        clear_tail(layer, trees, shape, end, head, tile)
