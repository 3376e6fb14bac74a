"""Operator process_logits_overlay: the effect of `process_logits` as an overlay that operators apply on load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.operator import Op
from ...triton_shared.triton_backend import triton_backend, why_not_float64
from .reference import process_logits_overlay as _reference

__all__ = ["process_logits_overlay"]


def _load_triton() -> Callable[..., Any]:
    from .launch import process_logits_overlay

    return process_logits_overlay


process_logits_overlay = Op("process_logits_overlay", _reference, [triton_backend(_load_triton, why_not_float64)])
