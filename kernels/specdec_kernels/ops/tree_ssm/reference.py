"""Plain PyTorch definition of tree_ssm."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._recurrence.gates import check_state, gate_of, heads_of, start_state
from .._recurrence.packed_nodes import check_advance, check_nodes, check_tree, check_tree_shapes, walk_nodes


class SsmArguments(NamedTuple):
    """The arguments of `tree_ssm`, which describes them."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_gate: Tensor
    state: Tensor
    rows: Tensor
    lengths: Tensor
    offsets: Tensor
    parents: Tensor | None = None
    decay: Tensor | None = None
    advance: bool = False


def check(given: SsmArguments) -> None:
    """Raises ValueError for shapes or dtypes that do not fit."""
    op = "tree_ssm"
    *_, nodes = check_state(op, given.state, given.key, given.value, given.log_gate, given.decay)
    if given.query.shape != given.key.shape:
        raise ValueError(f"{op}: query is {list(given.query.shape)}; expected {list(given.key.shape)}")
    check_tree_shapes(op, nodes, given.rows, given.lengths, given.offsets, given.parents)
    check_advance(op, given.parents, given.advance)


def check_data(*args: Any, **named: Any) -> None:
    """Raises ValueError for rows, offsets or parents that do not fit; the arguments are those of `tree_ssm`."""
    given = SsmArguments(*args, **named)
    batch = given.rows, given.lengths, given.offsets, given.parents
    check_nodes("tree_ssm", len(given.value), len(given.state), *batch)


def tree_ssm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    state: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None = None,
    decay: Tensor | None = None,
    advance: bool = False,
) -> Tensor:
    """The selective state space recurrence over packed trees: each node continues the state of its parent.

    With S the parent's state, that of a node is exp(log_gate) S + key value, and its output is query S. For Mamba-2
    (arXiv 2405.21060) the key is B, the query C, the value dt x, and log_gate dt A. For Mamba-1 (arXiv 2312.00752) the
    channels are the columns of one head, each with its own step: log_gate is dt, and `decay` is A. The record of a node
    is its key, value and log_gate (`state_commit`).

    The bits of a node depend on its ancestors only. So a tree, a chain and one node at a time give the same. Backend
    "triton" alone solves a triangular system (without `decay`), whose rounding differs with the tree;
    "triton_sequence" does not.

    On a GPU this reference waits for the device. The Triton launches do not: a CUDA graph can capture them.

    Args:
        query: [M, G, K], any float dtype. Heads h * H / G to (h + 1) * H / G - 1 share it.
        key: [M, G, K].
        value: [M, H, V].
        log_gate: Logarithm of the factor of the state: [M, H], or [M, H, K] for one per channel of the key. With
            `decay`, the steps [M, H, V] by which it is multiplied.
        state: States of committed texts, float32 or float64 [R, H, K, V]. Only `advance` writes to them.
        rows: Row of each request, int32 [B].
        lengths: Committed tokens of each request, int32 [B]. A state of 0 tokens counts as zeros.
        offsets: First node of each request, int32 [B + 1].
        parents: Parent of each node by its index in its tree, -1 at roots, int32 [M]; None for chains.
        decay: Logarithms of factors for a step of 1, [H, K, V], or None.
        advance: Commit chains at once: the state after the last node replaces that of its row.

    Returns:
        Outputs [M, H, V] in the dtype of `value`. Nodes from offsets[B] on have zeros.

    Raises:
        ValueError: If shapes, dtypes or parents do not fit.
    """
    check(SsmArguments(query, key, value, log_gate, state, rows, lengths, offsets, parents, decay, advance))
    op, heads = "tree_ssm", state.shape[1]
    check_tree(op, len(value), len(state), rows, lengths, offsets, parents)
    wide = state.dtype
    queries, keys = heads_of(query.to(wide), heads), heads_of(key.to(wide), heads)
    values, gates = value.to(wide), log_gate.to(wide)
    outputs = torch.zeros_like(values)
    rates = None if decay is None else decay.to(wide)
    states: dict[int, Tensor] = {}
    row_of, counts = rows.tolist(), lengths.tolist()
    for request, node, parent in walk_nodes(op, offsets, parents):
        before = states[parent] if parent >= 0 else start_state(state, row_of[request], counts[request])
        added = keys[node][:, :, None] * values[node][:, None, :]
        states[node] = before * gate_of(gates[node], rates) + added
        outputs[node] = (states[node] * queries[node][:, :, None]).sum(1)
        if advance:
            states.pop(parent, None)
    if advance:
        for row, start, end in zip(row_of, offsets.tolist(), offsets[1:].tolist()):
            if end > start:
                state[row] = states[end - 1]
    return outputs.to(value.dtype)
