"""C++ backend of tree_ssm: tiles of columns, whose states stay in the caches for all nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._recurrence.cpu_inputs import in_one_piece
from .reference import SsmArguments

_tree_ssm = torch.ops.specdec.tree_ssm.default


def tree_ssm(*args: Any, **named: Any) -> Tensor:
    """Calls the C++ operator with inputs in contiguous memory."""
    given = SsmArguments(*args, **named)
    batch = in_one_piece(given.rows, given.lengths, given.offsets, given.parents, given.decay)
    outputs: Tensor = _tree_ssm(*in_one_piece(*given[:4]), given.state, *batch, given.advance)
    return outputs
