"""Operators traversal_verify (leaf-to-root verification on trees) and traversal_thresholds (its introspection)."""

from __future__ import annotations

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import dists_signature, triton_backend, why_not_float64_dists
from .reference import traversal_thresholds as _thresholds
from .reference import traversal_verify as _verify

__all__ = ["traversal_thresholds", "traversal_verify"]


_key = dists_signature(target=6, draft=7)
_why_not = why_not_float64_dists(target=6, draft=7)
traversal_verify = Op(
    "traversal_verify",
    _verify,
    [
        triton_backend(lazy_import(__name__, "launch:traversal_verify"), _why_not),
        cpu_backend(lazy_import(__name__, "cpu_kernel:traversal_verify"), op="traversal_verify"),
    ],
    key=_key,
    direct_backends=("triton",),
    overlaid="target",
)
traversal_thresholds = Op(
    "traversal_thresholds",
    _thresholds,
    [
        triton_backend(lazy_import(__name__, "launch:traversal_thresholds"), _why_not),
        cpu_backend(lazy_import(__name__, "cpu_kernel:traversal_thresholds"), op="traversal_thresholds"),
    ],
    key=_key,
    overlaid="target",
)
