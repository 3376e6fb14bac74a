"""tree_expand: the best children of the frontier nodes of growing trees, and the best children of each tree."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import INTERPRETED, triton_backend
from .reference import tree_expand as _reference

__all__ = ["tree_expand"]


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
    [
        triton_backend(lazy_import(__name__, "launch:tree_expand"), _why_not_triton),
        cpu_backend(lazy_import(__name__, "cpu_kernel:tree_expand"), op="tree_expand"),
    ],
    key=_key,
    direct_backends=("triton",),
)
