"""Operator draft_sample: samples for drafters, independent of all randomness of the verification."""

from __future__ import annotations

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend, why_not_float64
from .reference import draft_sample as _reference

__all__ = ["draft_sample"]


draft_sample = Op(
    "draft_sample",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:draft_sample"), why_not_float64),
        cpu_backend(lazy_import(__name__, "cpu_kernel:draft_sample"), op="draft_sample"),
    ],
    direct_backends=("triton",),
    overlaid="logits",
)
