"""Operators recursive_rejection_verify (rejection sampling over ordered proposals on trees) and
recursive_rejection_thresholds (its introspection).
"""

from __future__ import annotations

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import dists_signature, triton_backend, why_not_float64_dists
from .reference import recursive_rejection_thresholds as _thresholds
from .reference import recursive_rejection_verify as _verify

__all__ = ["recursive_rejection_thresholds", "recursive_rejection_verify"]


_key = dists_signature(target=6, draft=7)
_why_not = why_not_float64_dists(target=6, draft=7)
recursive_rejection_verify = Op(
    "recursive_rejection_verify",
    _verify,
    [
        triton_backend(lazy_import(__name__, "launch:recursive_rejection_verify"), _why_not),
        cpu_backend(lazy_import(__name__, "cpu_kernel:recursive_rejection_verify"), op="recursive_rejection_verify"),
    ],
    key=_key,
    direct_backends=("triton",),
    overlaid="target",
)
recursive_rejection_thresholds = Op(
    "recursive_rejection_thresholds",
    _thresholds,
    [
        triton_backend(lazy_import(__name__, "launch:recursive_rejection_thresholds"), _why_not),
        cpu_backend(
            lazy_import(__name__, "cpu_kernel:recursive_rejection_thresholds"), op="recursive_rejection_thresholds"
        ),
    ],
    key=_key,
    overlaid="target",
)
