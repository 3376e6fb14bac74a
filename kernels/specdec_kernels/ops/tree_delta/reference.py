"""Plain PyTorch definition of tree_delta."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._recurrence.gates import check_state, gate_of, heads_of, start_state
from .._recurrence.packed_nodes import check_advance, check_nodes, check_tree, check_tree_shapes, walk_nodes


class DeltaArguments(NamedTuple):
    """The arguments of `tree_delta`, which describes them."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_gate: Tensor
    beta: Tensor
    state: Tensor
    rows: Tensor
    lengths: Tensor
    offsets: Tensor
    parents: Tensor | None = None
    advance: bool = False


def check(given: DeltaArguments) -> None:
    """Raises ValueError for shapes or dtypes that do not fit."""
    op = "tree_delta"
    _, heads, _, _, nodes = check_state(op, given.state, given.key, given.value, given.log_gate, None)
    if given.query.shape != given.key.shape or given.beta.shape != (nodes, heads):
        raise ValueError(
            f"{op}: query is {list(given.query.shape)} and beta {list(given.beta.shape)}; expected "
            f"{list(given.key.shape)} and [{nodes}, {heads}]"
        )
    check_tree_shapes(op, nodes, given.rows, given.lengths, given.offsets, given.parents)
    check_advance(op, given.parents, given.advance)


def check_data(*args: Any, **named: Any) -> None:
    """Raises ValueError for rows, offsets or parents that do not fit; the arguments are those of `tree_delta`."""
    given = DeltaArguments(*args, **named)
    batch = given.rows, given.lengths, given.offsets, given.parents
    check_nodes("tree_delta", len(given.value), len(given.state), *batch)


def tree_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    beta: Tensor,
    state: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None = None,
    advance: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over packed trees: each node continues the state of its parent.

    With S the parent's state, a node computes S' = exp(log_gate) S, correction u = beta (value - key S'), its state
    S' + key u, and the output query S. (Gated DeltaNet, arXiv 2412.06464; one gate per channel: Kimi Linear, arXiv
    2510.26692.) Its key, u and log_gate are its record: `state_commit` replays the records of an accepted path.

    The bits of a node depend on its ancestors only. So a tree, a chain and one node at a time give the same. Backend
    "triton" alone solves a triangular system, whose rounding differs with the tree; "triton_sequence" does not.

    On a GPU this reference waits for the device. The Triton launches do not: a CUDA graph can capture them.

    Args:
        query: [M, G, K], any float dtype, scaled and normalized. Heads h * H / G to (h + 1) * H / G - 1 share it.
        key: [M, G, K], normalized.
        value: [M, H, V].
        log_gate: Logarithm of the factor of the state, at most 0: [M, H], or [M, H, K] for one per channel.
        beta: Learning rates [M, H].
        state: States of committed texts, float32 or float64 [R, H, K, V]. Only `advance` writes to them.
        rows: Row of each request, int32 [B].
        lengths: Committed tokens of each request, int32 [B]. A state of 0 tokens counts as zeros.
        offsets: First node of each request, int32 [B + 1].
        parents: Parent of each node by its index in its tree, -1 at roots, int32 [M]; None for chains.
        advance: Commit chains at once: the state after the last node replaces that of its row.

    Returns:
        Outputs [M, H, V] in the dtype of `value`, and corrections [M, H, V] in that of `state`. Nodes from offsets[B]
        on have zeros.

    Raises:
        ValueError: If shapes, dtypes or parents do not fit.
    """
    check(DeltaArguments(query, key, value, log_gate, beta, state, rows, lengths, offsets, parents, advance))
    op, heads = "tree_delta", state.shape[1]
    check_tree(op, len(value), len(state), rows, lengths, offsets, parents)
    wide = state.dtype
    queries, keys = heads_of(query.to(wide), heads), heads_of(key.to(wide), heads)
    values, gates, rates = value.to(wide), log_gate.to(wide), beta.to(wide)
    outputs, corrections = torch.zeros_like(values), torch.zeros_like(values)
    states: dict[int, Tensor] = {}
    row_of, counts = rows.tolist(), lengths.tolist()
    for request, node, parent in walk_nodes(op, offsets, parents):
        before = states[parent] if parent >= 0 else start_state(state, row_of[request], counts[request])
        decayed = before * gate_of(gates[node], None)
        own_key = keys[node][:, :, None]
        correction = (values[node] - (decayed * own_key).sum(1)) * rates[node][:, None]
        states[node] = decayed + own_key * correction[:, None, :]
        outputs[node] = (states[node] * queries[node][:, :, None]).sum(1)
        corrections[node] = correction
        if advance:
            states.pop(parent, None)
    if advance:
        for row, start, end in zip(row_of, offsets.tolist(), offsets[1:].tolist()):
            if end > start:
                state[row] = states[end - 1]
    return outputs.to(value.dtype), corrections
