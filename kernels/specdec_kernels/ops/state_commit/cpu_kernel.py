"""C++ backends of state_commit and window_commit."""

from __future__ import annotations

import torch
from torch import Tensor

from .._recurrence.cpu_inputs import in_one_piece

_state_commit = torch.ops.specdec.state_commit.default
_window_commit = torch.ops.specdec.window_commit.default


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
    """Calls the C++ operator with inputs in contiguous memory."""
    _state_commit(state, *in_one_piece(key, value, log_gate, rows, lengths, path, decay))


def window_commit(window: Tensor, inputs: Tensor, rows: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Calls the C++ operator with inputs in contiguous memory."""
    _window_commit(window, *in_one_piece(inputs, rows, lengths, path))
