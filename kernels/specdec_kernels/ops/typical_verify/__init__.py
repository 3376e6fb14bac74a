"""Operator typical_verify: typical acceptance on trees. Lossy: it does not keep the target's distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import dists_signature, triton_backend, why_not_float64_dists
from .reference import typical_verify as _reference

__all__ = ["typical_verify"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import typical_verify

    return typical_verify


def _load_triton() -> Callable[..., Any]:
    from .launch import typical_verify

    return typical_verify


typical_verify = Op(
    "typical_verify",
    _reference,
    [triton_backend(_load_triton, why_not_float64_dists(target=4)), cpu_backend(_load_cpu, op="typical_verify")],
    key=dists_signature(target=4),
    direct_backends=("triton",),
    overlaid="target",
)
