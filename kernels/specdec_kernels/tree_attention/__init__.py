"""Attention of packed token trees over a paged cache. See `tree_attention` for the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Op
from ..extension import cpu_backend
from .reference import tree_attention as _reference


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import tree_attention

    return tree_attention


tree_attention = Op("tree_attention", _reference, [cpu_backend(_load_cpu, op="tree_attention")])

__all__ = ["tree_attention"]
