"""distribution_stats: what a row of logits and sampling parameters say as a distribution (inv_t, lse, cut, tie_id)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import half_or_single, triton_backend
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
    [triton_backend(_load_triton, half_or_single), cpu_backend(_load_cpu, op="distribution_stats")],
    direct_backends=("triton",),
    overlaid="logits",
)
