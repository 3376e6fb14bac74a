"""Operator distribution_stats: four numbers per row that define its sampling distribution.

Temperature, top-k, top-p and min-p act here. Penalties, biases and masks are applied before, by `process_logits`.
"""

from __future__ import annotations

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend, why_not_float64
from .reference import dist_probs
from .reference import distribution_stats as _reference

__all__ = ["dist_probs", "distribution_stats"]


distribution_stats = Op(
    "distribution_stats",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:distribution_stats"), why_not_float64),
        cpu_backend(lazy_import(__name__, "cpu_kernel:distribution_stats"), op="distribution_stats"),
    ],
    direct_backends=("triton",),
    overlaid="logits",
)
