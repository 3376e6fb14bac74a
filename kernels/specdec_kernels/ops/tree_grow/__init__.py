"""tree_grow: one level of a dynamic draft tree, which expands its best nodes and finally keeps the best of all."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import INTERPRETED, triton_backend
from .reference import Growth
from .reference import tree_grow as _reference

__all__ = ["Growth", "tree_grow"]


def _why_not_triton(logits: Tensor, *args: Any, width: int, **kwargs: Any) -> str | None:
    from ..tree_expand.launch import why_not

    return why_not(logits, width)


def _key(logits: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    if logits.is_cpu and not INTERPRETED:
        return logits.dtype
    return logits.device, logits.dtype, logits.shape[-1], kwargs["width"]


tree_grow = Op(
    "tree_grow",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:tree_grow"), _why_not_triton),
        cpu_backend(lazy_import(__name__, "cpu_kernel:tree_grow"), op="tree_grow"),
    ],
    key=_key,
    direct_backends=("triton",),
)
