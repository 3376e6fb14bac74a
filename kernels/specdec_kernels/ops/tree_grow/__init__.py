"""tree_grow: one level of a dynamic draft tree, which expands its best nodes and finally keeps the best of all."""

from __future__ import annotations

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend
from ..tree_expand import expansion_key, why_not_triton
from .reference import Growth
from .reference import tree_grow as _reference

__all__ = ["Growth", "tree_grow"]


tree_grow = Op(
    "tree_grow",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:tree_grow"), why_not_triton),
        cpu_backend(lazy_import(__name__, "cpu_kernel:tree_grow"), op="tree_grow"),
    ],
    key=expansion_key,
    direct_backends=("triton",),
)
