"""The linear recurrence of one node: gates, updates of the state, and what its record holds.

The state of a head is a matrix [K, V]. A node multiplies it by its gate and adds the product of its key and a value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_state(
    op: str, state: Tensor, key: Tensor, value: Tensor, log_gate: Tensor, decay: Tensor | None
) -> tuple[int, int, int, int, int]:
    """Checks shapes and dtypes of a recurrence.

    Args:
        op: Name of the operator, for messages.
        state: float32 or float64 [R, H, K, V].
        key: [M, G, K]; H is a multiple of G.
        value: [M, H, V].
        log_gate: [M, H] or [M, H, K]; with `decay`, [M, H, V].
        decay: [H, K, V] or None.

    Returns:
        R, H, K, V and M.

    Raises:
        ValueError: If they do not fit.
    """
    if state.dim() != 4 or state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{op}: state is {state.dtype} {list(state.shape)}; expected float32 [R, H, K, V]")
    capacity, heads, keys, width = state.shape
    nodes = value.shape[0]
    groups = key.shape[1] if key.dim() == 3 else 0
    if key.dim() != 3 or key.shape[0] != nodes or key.shape[2] != keys or not groups or heads % groups:
        raise ValueError(
            f"{op}: key is {list(key.shape)}; expected [{nodes}, G, {keys}], where G divides {heads} heads"
        )
    if value.shape != (nodes, heads, width):
        raise ValueError(f"{op}: value is {list(value.shape)}; expected [{nodes}, {heads}, {width}]")
    allowed = [(nodes, heads, width)] if decay is not None else [(nodes, heads), (nodes, heads, keys)]
    if log_gate.shape not in allowed:
        expected = " or ".join(str(list(each)) for each in allowed)
        raise ValueError(f"{op}: log_gate is {list(log_gate.shape)}; expected {expected}")
    if decay is not None and decay.shape != (heads, keys, width):
        raise ValueError(f"{op}: decay is {list(decay.shape)}; expected [{heads}, {keys}, {width}]")
    return capacity, heads, keys, width, nodes


def gate_of(log_gate: Tensor, decay: Tensor | None) -> Tensor:
    """Returns the factor of the state at one node.

    Args:
        log_gate: [H], [H, K], or with `decay` [H, V].
        decay: [H, K, V] or None.

    Returns:
        [H, 1 or K, 1 or V].
    """
    if decay is not None:
        return (log_gate[:, None, :] * decay).exp()
    return log_gate.exp()[:, None, None] if log_gate.dim() == 1 else log_gate.exp()[:, :, None]


def start_state(state: Tensor, row: int, length: int) -> Tensor:
    """Returns the state [H, K, V] before the first node of a row: zeros for a text without tokens."""
    return state[row].clone() if length else torch.zeros_like(state[row])


def heads_of(part: Tensor, heads: int) -> Tensor:
    """Repeats keys or queries [M, G, K] for the heads that share them, [M, H, K]."""
    return part if part.shape[1] == heads else part.repeat_interleave(heads // part.shape[1], 1)
