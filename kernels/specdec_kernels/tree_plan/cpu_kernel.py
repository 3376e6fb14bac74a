"""C++ backend of tree_plan."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import expect
from .plan import TreePlan
from .reference import check

_tree_plan = torch.ops.specdec.tree_plan.default


def tree_plan(parents: Tensor, offsets: Tensor) -> TreePlan:
    try:
        return TreePlan(*_tree_plan(parents, offsets))
    except (RuntimeError, ValueError):
        check(parents, offsets)  # raises with a remedy
        return TreePlan(*_tree_plan(*expect.contiguous(parents, offsets)))
