"""C++ backend of tree_expand."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .reference import check

_tree_expand = torch.ops.specdec.tree_expand.default


def tree_expand(
    logits: Tensor,
    inv_t: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    offsets: Tensor,
    scores: Tensor,
    *,
    width: int,
    keep: int,
    sharpness: float = 1.0,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    try:
        found: tuple[Tensor, Tensor, Tensor] = _tree_expand(
            logits, inv_t, cut, tie_id, offsets, scores, width, keep, sharpness, seeds, positions
        )
        return found
    except (RuntimeError, ValueError):
        check(
            logits, inv_t, cut, tie_id, offsets, scores, width, keep, sharpness, seeds, positions
        )  # raises with a message that says what to do
        again = argument_checks.make_contiguous(inv_t, cut, tie_id, offsets, scores)
        keys = argument_checks.make_contiguous(seeds, positions)
        found = _tree_expand(logits, *again, width, keep, sharpness, *keys)
        return found
