"""Operator distribution_stats: four numbers per row that define its sampling distribution.

Temperature, top-k, top-p and min-p act here. Penalties, biases and masks are applied before, by `process_logits`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import triton_backend, why_not_float64
from .reference import dist_probs
from .reference import distribution_stats as _reference

__all__ = ["dist_probs", "distribution_stats"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import distribution_stats

    return distribution_stats


def _load_triton() -> Callable[..., Any]:
    from .launch import distribution_stats

    return distribution_stats


distribution_stats = Op(
    "distribution_stats",
    _reference,
    [triton_backend(_load_triton, why_not_float64), cpu_backend(_load_cpu, op="distribution_stats")],
    direct_backends=("triton",),
    overlaid="logits",
)
