"""C++ backend of tree_delta: tiles of columns, whose states stay in the caches for all nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._recurrence.cpu_inputs import in_one_piece
from .reference import DeltaArguments

_tree_delta = torch.ops.specdec.tree_delta.default


def tree_delta(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Calls the C++ operator with inputs in contiguous memory."""
    given = DeltaArguments(*args, **named)
    batch = in_one_piece(given.rows, given.lengths, given.offsets, given.parents)
    results: tuple[Tensor, Tensor] = _tree_delta(*in_one_piece(*given[:5]), given.state, *batch, given.advance)
    return results
