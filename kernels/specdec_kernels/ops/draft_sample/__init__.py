"""Operator draft_sample: samples for drafters, independent of all randomness of the verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import triton_backend, why_not_float64
from .reference import draft_sample as _reference

__all__ = ["draft_sample"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import draft_sample

    return draft_sample


def _load_triton() -> Callable[..., Any]:
    from .launch import draft_sample

    return draft_sample


draft_sample = Op(
    "draft_sample",
    _reference,
    [triton_backend(_load_triton, why_not_float64), cpu_backend(_load_cpu, op="draft_sample")],
    direct_backends=("triton",),
    overlaid="logits",
)
