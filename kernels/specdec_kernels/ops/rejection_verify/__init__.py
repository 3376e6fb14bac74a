"""Operators rejection_verify (rejection and block rule on chains), rejection_verify_logits (the same with
distribution_stats in it) and rejection_thresholds (their introspection).
"""

from __future__ import annotations

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import dists_signature, triton_backend, why_not_float64_dists
from .._proposals.checks import DETERMINISTIC, SAMPLED
from .checks import BLOCK_RULE, REJECTION
from .reference import rejection_thresholds as _thresholds
from .reference import rejection_verify as _verify
from .reference import rejection_verify_logits as _verify_logits

__all__ = [
    "BLOCK_RULE",
    "DETERMINISTIC",
    "REJECTION",
    "SAMPLED",
    "rejection_thresholds",
    "rejection_verify",
    "rejection_verify_logits",
]


_DISTS = {"target": 4, "draft": 5}
_LOGITS = {"logits": 4, "draft": 6}
_key = dists_signature(**_DISTS)
_why_not = why_not_float64_dists(**_DISTS)
rejection_verify = Op(
    "rejection_verify",
    _verify,
    [
        triton_backend(lazy_import(__name__, "launch:rejection_verify"), _why_not),
        cpu_backend(lazy_import(__name__, "cpu_kernel:rejection_verify"), op="rejection_verify"),
    ],
    key=_key,
    direct_backends=("triton",),
    overlaid="target",
)
rejection_verify_logits = Op(
    "rejection_verify_logits",
    _verify_logits,
    [
        triton_backend(lazy_import(__name__, "launch:rejection_verify_logits"), why_not_float64_dists(**_LOGITS)),
        cpu_backend(lazy_import(__name__, "cpu_kernel:rejection_verify_logits"), op="rejection_verify_logits"),
    ],
    key=dists_signature(**_LOGITS),
    direct_backends=("triton",),
    overlaid="logits",
)
rejection_thresholds = Op(
    "rejection_thresholds",
    _thresholds,
    [
        triton_backend(lazy_import(__name__, "launch:rejection_thresholds"), _why_not),
        cpu_backend(lazy_import(__name__, "cpu_kernel:rejection_thresholds"), op="rejection_thresholds"),
    ],
    key=_key,
    overlaid="target",
)
