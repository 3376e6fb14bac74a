"""tree_verify: follow the target's own choices through a draft tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Op
from ..extension import cpu_backend
from ..triton_backend import triton_backend
from .reference import tree_verify as _reference

__all__ = ["tree_verify"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import tree_verify

    return tree_verify


def _load_triton() -> Callable[..., Any]:
    from .launch import tree_verify

    return tree_verify


tree_verify = Op(
    "tree_verify",
    _reference,
    [triton_backend(_load_triton), cpu_backend(_load_cpu, op="tree_verify")],
    direct=("triton",),
)
