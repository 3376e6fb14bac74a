"""C++ backend of tree_delta: tiles of columns, whose states stay in the caches for all nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from .._recurrence.cpu_inputs import in_one_piece

_tree_delta = torch.ops.specdec.tree_delta.default


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
    """Calls the C++ operator with inputs in contiguous memory."""
    inputs = in_one_piece(query, key, value, log_gate, beta)
    results: tuple[Tensor, Tensor] = _tree_delta(
        *inputs,
        state,
        *in_one_piece(rows, lengths, offsets),
        None if parents is None else parents.contiguous(),
        advance,
    )
    return results
