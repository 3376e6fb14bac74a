"""C++ backend of tree_plan."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .plan import TreePlan
from .reference import check_arguments

_tree_plan = torch.ops.specdec.tree_plan.default


def tree_plan(parents: Tensor, offsets: Tensor, max_nodes: int | None = None) -> TreePlan:
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    try:
        plan = TreePlan(*_tree_plan(parents, offsets))
    except (RuntimeError, ValueError):
        check_arguments(parents, offsets)  # raises with a message that says what to do
        plan = TreePlan(*_tree_plan(*argument_checks.make_contiguous(parents, offsets)))
    return plan if max_nodes is None else plan.widened(max_nodes)
