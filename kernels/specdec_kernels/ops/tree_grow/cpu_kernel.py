"""C++ backend of tree_grow."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ..tree_plan.plan import TreePlan
from .reference import Growth, check

_tree_grow = torch.ops.specdec.tree_grow.default


def tree_grow(
    logits: Tensor,
    inv_t: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    offsets: Tensor,
    growth: Growth,
    *,
    level: int,
    width: int,
    last: bool = False,
    sharpness: float = 1.0,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, TreePlan]:
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    sizes = level, width, growth.keep, last, sharpness
    table = growth.tokens, growth.scores, growth.parents, growth.nodes, growth.limits
    try:
        found = _tree_grow(logits, inv_t, cut, tie_id, offsets, *table, *sizes, seeds, positions)
    except (RuntimeError, ValueError):
        check(logits, inv_t, cut, tie_id, offsets, growth, level, width, sharpness, seeds, positions)
        dist = argument_checks.make_contiguous(inv_t, cut, tie_id, offsets)
        found = _tree_grow(logits, *dist, *table, *sizes, *argument_checks.make_contiguous(seeds, positions))
    return found[0], found[1], found[2], TreePlan(*found[3:])
