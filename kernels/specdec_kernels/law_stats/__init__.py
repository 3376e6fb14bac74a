"""law_stats: what a row of logits and sampling parameters say as a law (inv_t, lse, cut, tie_id)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Op
from ..extension import cpu_backend
from ..triton_backend import half_or_single, triton_backend
from .reference import law_stats as _reference
from .reference import law_weights

__all__ = ["law_stats", "law_weights"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import law_stats

    return law_stats


def _load_triton() -> Callable[..., Any]:
    from .launch import law_stats

    return law_stats


law_stats = Op(
    "law_stats",
    _reference,
    [triton_backend(_load_triton, half_or_single), cpu_backend(_load_cpu, op="law_stats")],
    direct=("triton",),
    edited="logits",
)
