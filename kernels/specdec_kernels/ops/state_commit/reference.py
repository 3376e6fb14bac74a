"""Plain PyTorch definitions of state_commit and window_commit."""

from __future__ import annotations

import torch
from torch import Tensor

from .._recurrence.gates import check_state, gate_of, heads_of, start_state
from .._recurrence.packed_nodes import check_path, check_path_shapes
from ..tree_conv.reference import check_window


def check_states(
    state: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    rows: Tensor,
    lengths: Tensor,
    path: Tensor,
    decay: Tensor | None = None,
) -> None:
    """Raises ValueError for shapes or dtypes that do not fit; the arguments are those of `state_commit`."""
    check_state("state_commit", state, key, value, log_gate, decay)
    check_path_shapes("state_commit", rows, lengths, path)


def check_state_data(
    state: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    rows: Tensor,
    lengths: Tensor,
    path: Tensor,
    decay: Tensor | None = None,
) -> None:
    """Raises ValueError for rows or nodes that do not fit; the arguments are those of `state_commit`."""
    check_path("state_commit", len(state), len(value), rows, lengths, path)


def check_windows(window: Tensor, inputs: Tensor, rows: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Raises ValueError for shapes or dtypes that do not fit; the arguments are those of `window_commit`."""
    check_window("window_commit", inputs, window)
    if inputs.dtype != window.dtype:
        raise ValueError(f"window_commit: inputs is {inputs.dtype}; expected {window.dtype}, as the window is")
    check_path_shapes("window_commit", rows, lengths, path)


def check_window_data(window: Tensor, inputs: Tensor, rows: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Raises ValueError for rows or nodes that do not fit; the arguments are those of `window_commit`."""
    check_path("window_commit", len(window), len(inputs), rows, lengths, path)


def state_commit(
    state: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    rows: Tensor,
    lengths: Tensor,
    path: Tensor,
    decay: Tensor | None = None,
) -> None:
    """Replays the records of accepted paths, so that the states are those after their last nodes.

    The bits equal those that `tree_delta` and `tree_ssm` computed for these nodes, on a CPU and on backend
    "triton_sequence". Those of a triangular system (backend "triton") differ by rounding.

    On a GPU this reference waits for the device. The Triton launch does not: a CUDA graph can capture it.

    Args:
        state: States of committed texts, float32 or float64 [R, H, K, V]. The rows of the batch are written.
        key: Keys of M nodes, [M, G, K].
        value: What each key adds, [M, H, V]: the corrections of `tree_delta`, the values of `tree_ssm`.
        log_gate: [M, H] or [M, H, K]; with `decay`, steps [M, H, V].
        rows: Row of each request, int32 [B].
        lengths: Committed tokens of each request before this step, int32 [B].
        path: Accepted nodes on the packed axis, root first and padded with -1, int32 [B, D + 1].
        decay: [H, K, V] or None.

    Raises:
        ValueError: If shapes, dtypes, rows or nodes do not fit.
    """
    check_state("state_commit", state, key, value, log_gate, decay)
    check_path("state_commit", len(state), len(value), rows, lengths, path)
    heads = state.shape[1]
    wide = state.dtype
    keys, values, gates = heads_of(key.to(wide), heads), value.to(wide), log_gate.to(wide)
    rates = None if decay is None else decay.to(wide)
    for row, length, accepted in zip(rows.tolist(), lengths.tolist(), path.tolist()):
        own = start_state(state, row, length)
        kept = [node for node in accepted if node >= 0]
        for node in kept:
            own = own * gate_of(gates[node], rates) + keys[node][:, :, None] * values[node][:, None, :]
        if kept:
            state[row] = own


def window_commit(window: Tensor, inputs: Tensor, rows: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Moves convolution windows behind the last nodes of accepted paths.

    On a GPU this reference waits for the device. The Triton launch does not: a CUDA graph can capture it.

    Args:
        window: The last W - 1 inputs of committed texts, oldest first, [R, W - 1, C]. It is written.
        inputs: Inputs of M nodes, [M, C], in the dtype of `window`.
        rows: Row of each request, int32 [B].
        lengths: Committed tokens of each request before this step, int32 [B].
        path: Accepted nodes on the packed axis, root first and padded with -1, int32 [B, D + 1].

    Raises:
        ValueError: If shapes, dtypes, rows or nodes do not fit.
    """
    check_windows(window, inputs, rows, lengths, path)
    check_path("window_commit", window.shape[0], inputs.shape[0], rows, lengths, path)
    for row, length, accepted in zip(rows.tolist(), lengths.tolist(), path.tolist()):
        kept = [node for node in accepted if node >= 0]
        if kept:
            before = window[row] if length else torch.zeros_like(window[row])
            window[row] = torch.cat([before, inputs[kept]])[len(kept) :].clone()
