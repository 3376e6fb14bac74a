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


def why_not_triton(logits: Tensor, *args: Any, width: int, **kwargs: Any) -> str | None:
    """Returns why the Triton kernels of tree_expand and tree_grow cannot serve a call, or None."""
    from .launch import why_not

    return why_not(logits, width)


def expansion_key(logits: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    """Computes the signature of a call of tree_expand or tree_grow, for the choice of its backend."""
    if logits.is_cpu and not INTERPRETED:
        return logits.dtype
    return logits.device, logits.dtype, logits.shape[-1], kwargs["width"]


tree_expand = Op(
    "tree_expand",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:tree_expand"), why_not_triton),
        cpu_backend(lazy_import(__name__, "cpu_kernel:tree_expand"), op="tree_expand"),
    ],
    key=expansion_key,
    direct_backends=("triton",),
)
