"""tree_expand: the best children of the nodes at the border of growing trees, and the best of each tree's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Op
from ..extension import cpu_backend
from .reference import tree_expand as _reference

__all__ = ["tree_expand"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import tree_expand

    return tree_expand


tree_expand = Op("tree_expand", _reference, [cpu_backend(_load_cpu, op="tree_expand")])
