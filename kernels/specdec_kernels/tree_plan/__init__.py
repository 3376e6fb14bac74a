"""tree_plan: depths, ancestor words and child links of a packed batch of trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Op
from ..extension import cpu_backend
from .plan import TreePlan
from .reference import tree_plan as _reference

__all__ = ["TreePlan", "tree_plan"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import tree_plan

    return tree_plan


tree_plan = Op("tree_plan", _reference, [cpu_backend(_load_cpu)])
