"""Plain PyTorch definitions of state_commit and window_commit."""

from __future__ import annotations

import torch
from torch import Tensor

from .._recurrence.gates import check_state, gate_of, heads_of, start_state
from ..tree_conv.reference import check_window


def _check_path(op: str, capacity: int, nodes: int, rows: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Raises ValueError for shapes, rows and nodes that do not fit."""
    batch = rows.shape[0]
    if rows.dtype != torch.int32 or lengths.dtype != torch.int32 or lengths.shape != rows.shape or rows.dim() != 1:
        raise ValueError(
            f"{op}: rows is {rows.dtype} {list(rows.shape)} and lengths {lengths.dtype} {list(lengths.shape)}; "
            "expected int32 [B] each"
        )
    if path.dtype != torch.int32 or path.dim() != 2 or path.shape[0] != batch:
        raise ValueError(f"{op}: path is {path.dtype} {list(path.shape)}; expected int32 [{batch}, D + 1]")
    if batch and not (int(rows.min()) >= 0 and int(rows.max()) < capacity):
        raise ValueError(f"{op}: got rows {rows.tolist()}; expected row ids below {capacity}")
    if path.numel() and not -1 <= int(path.min()) <= int(path.max()) < nodes:
        raise ValueError(f"{op}: got path {path.tolist()}; expected nodes below {nodes}, padded with -1")


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

    The bits equal those that `tree_delta` and `tree_ssm` computed for these nodes.

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
    capacity, heads, _, _, nodes = check_state("state_commit", state, key, value, log_gate, decay)
    _check_path("state_commit", capacity, nodes, rows, lengths, path)
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

    Args:
        window: The last W - 1 inputs of committed texts, oldest first, [R, W - 1, C]. It is written.
        inputs: Inputs of M nodes, [M, C], in the dtype of `window`.
        rows: Row of each request, int32 [B].
        lengths: Committed tokens of each request before this step, int32 [B].
        path: Accepted nodes on the packed axis, root first and padded with -1, int32 [B, D + 1].

    Raises:
        ValueError: If shapes, dtypes, rows or nodes do not fit.
    """
    check_window("window_commit", inputs, window)
    if inputs.dtype != window.dtype:
        raise ValueError(f"window_commit: inputs is {inputs.dtype}; expected {window.dtype}, as the window is")
    _check_path("window_commit", window.shape[0], inputs.shape[0], rows, lengths, path)
    for row, length, accepted in zip(rows.tolist(), lengths.tolist(), path.tolist()):
        kept = [node for node in accepted if node >= 0]
        if kept:
            before = window[row] if length else torch.zeros_like(window[row])
            window[row] = torch.cat([before, inputs[kept]])[len(kept) :].clone()
