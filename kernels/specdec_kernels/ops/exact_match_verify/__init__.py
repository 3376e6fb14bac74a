"""Operator exact_match_verify: follows the target's choices through draft trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import triton_backend
from .reference import exact_match_verify as _reference

__all__ = ["exact_match_verify"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import exact_match_verify

    return exact_match_verify


def _load_triton() -> Callable[..., Any]:
    from .launch import exact_match_verify

    return exact_match_verify


exact_match_verify = Op(
    "exact_match_verify",
    _reference,
    [triton_backend(_load_triton), cpu_backend(_load_cpu, op="exact_match_verify")],
    direct_backends=("triton",),
)
