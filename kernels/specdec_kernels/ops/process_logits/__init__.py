"""Operator process_logits: penalties, bias, forced tokens and masks, for every node on its own path.

Temperature, top-k, top-p and min-p are not applied here: `distribution_stats` turns them into effective distributions.
"""

from __future__ import annotations

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend, why_not_float64
from .processors import ALWAYS, Additions, Forced, NodePaths, Penalties, TokenMasks
from .reference import process_logits as _reference

__all__ = ["ALWAYS", "Additions", "Forced", "NodePaths", "Penalties", "TokenMasks", "process_logits"]


process_logits = Op(
    "process_logits",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:process_logits"), why_not_float64),
        cpu_backend(lazy_import(__name__, "cpu_kernel:process_logits"), op="process_logits"),
    ],
)
