"""C++ backend of tree_conv: tiles of channels over all nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from .._recurrence.cpu_inputs import in_one_piece
from .reference import check_activation

_tree_conv = torch.ops.specdec.tree_conv.default


def tree_conv(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None = None,
    activation: str | None = None,
    advance: bool = False,
) -> Tensor:
    """Calls the C++ operator with inputs in contiguous memory."""
    check_activation(activation)
    batch = in_one_piece(rows, lengths, offsets, parents)
    outputs: Tensor = _tree_conv(*in_one_piece(inputs, weight, bias), window, *batch, activation is not None, advance)
    return outputs
