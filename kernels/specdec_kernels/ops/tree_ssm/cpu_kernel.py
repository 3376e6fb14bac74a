"""C++ backend of tree_ssm: tiles of columns, whose states stay in the caches for all nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from .._recurrence.cpu_inputs import in_one_piece

_tree_ssm = torch.ops.specdec.tree_ssm.default


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
    """Calls the C++ operator with inputs in contiguous memory."""
    tree = None if parents is None else parents.contiguous()
    rates = None if decay is None else decay.contiguous()
    inputs, batch = in_one_piece(query, key, value, log_gate), in_one_piece(rows, lengths, offsets)
    outputs: Tensor = _tree_ssm(*inputs, state, *batch, tree, rates, advance)
    return outputs
