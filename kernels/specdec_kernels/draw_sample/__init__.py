"""draw_sample: fresh draws for drafters, independent of everything the verification will use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Op
from ..extension import cpu_backend
from ..triton_backend import half_or_single, triton_backend
from .reference import draw_sample as _reference

__all__ = ["draw_sample"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import draw_sample

    return draw_sample


def _load_triton() -> Callable[..., Any]:
    from .launch import draw_sample

    return draw_sample


draw_sample = Op(
    "draw_sample",
    _reference,
    [triton_backend(_load_triton, half_or_single), cpu_backend(_load_cpu, op="draw_sample")],
    direct=("triton",),
    edited="logits",
)
