"""tree_expand: the best children of the frontier nodes of growing trees, and the best children of each tree."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import INTERPRETED, triton_backend
from .reference import tree_expand as _reference

__all__ = ["tree_expand"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import tree_expand

    return tree_expand


def _load_triton() -> Callable[..., Any]:
    from .launch import tree_expand

    return tree_expand


def _why_not_triton(logits: Tensor, *args: Any, width: int, **kwargs: Any) -> str | None:
    from .launch import why_not

    return why_not(logits, width)


def _key(logits: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    if logits.is_cpu and not INTERPRETED:
        return logits.dtype
    return logits.device, logits.dtype, logits.shape[-1], kwargs["width"]


tree_expand = Op(
    "tree_expand",
    _reference,
    [triton_backend(_load_triton, _why_not_triton), cpu_backend(_load_cpu, op="tree_expand")],
    key=_key,
    direct_backends=("triton",),
)
