"""draft_sample: fresh draws for drafters, independent of everything the verification will use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import half_or_single, triton_backend
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
    [triton_backend(_load_triton, half_or_single), cpu_backend(_load_cpu, op="draft_sample")],
    direct_backends=("triton",),
    overlaid="logits",
)
