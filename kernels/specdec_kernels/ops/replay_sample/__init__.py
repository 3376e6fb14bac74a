"""replay_sample: tokens chosen by shared Gumbel noise, the same with and without speculation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import half_or_single, triton_backend
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
    [triton_backend(_load_triton, half_or_single), cpu_backend(_load_cpu, op="replay_sample")],
    direct_backends=("triton",),
    overlaid="logits",
)
