"""tree_plan: depths, ancestor words and child links of a packed batch of trees.

This plan is the structure of the trees. How one attention pass splits its work is `tree_attention.plan.AttentionPlan`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import INTERPRETED, triton_backend
from .plan import MOST_NODES, MOST_ROWS, TreePlan
from .reference import tree_plan as _reference

__all__ = ["TreePlan", "tree_plan"]


def _why_not_triton(*args: Any, **kwargs: Any) -> str | None:
    from .launch import why_not

    return why_not(*args, **kwargs)


def _key(parents: Tensor, offsets: Tensor, max_nodes: int | None = None) -> Hashable:
    if parents.is_cpu and not INTERPRETED:
        return parents.dtype
    most = parents.shape[0] if max_nodes is None else max_nodes
    return parents.device, parents.dtype, most > MOST_NODES, offsets.shape[0] > MOST_ROWS + 1


tree_plan = Op(
    "tree_plan",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:tree_plan"), _why_not_triton),
        cpu_backend(lazy_import(__name__, "cpu_kernel:tree_plan"), op="tree_plan"),
    ],
    key=_key,
    direct_backends=("triton",),
    check_data=_reference,
)
