"""Operator replay_sample: samples tokens with shared Gumbel noise, the same with and without speculation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import triton_backend, why_not_float64
from .reference import replay_sample as _reference

__all__ = ["replay_sample"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import replay_sample

    return replay_sample


def _load_triton() -> Callable[..., Any]:
    from .launch import replay_sample

    return replay_sample


replay_sample = Op(
    "replay_sample",
    _reference,
    [triton_backend(_load_triton, why_not_float64), cpu_backend(_load_cpu, op="replay_sample")],
    direct_backends=("triton",),
    overlaid="logits",
)
