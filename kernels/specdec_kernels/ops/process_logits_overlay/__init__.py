"""Operator process_logits_overlay: the effect of `process_logits` as an overlay that operators apply on load."""

from __future__ import annotations

from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend, why_not_float64
from .reference import process_logits_overlay as _reference

__all__ = ["process_logits_overlay"]


process_logits_overlay = Op(
    "process_logits_overlay",
    _reference,
    [triton_backend(lazy_import(__name__, "launch:process_logits_overlay"), why_not_float64)],
)
