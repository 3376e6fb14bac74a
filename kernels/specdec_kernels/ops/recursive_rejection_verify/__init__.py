"""Operators recursive_rejection_verify (rejection sampling over ordered proposals on trees) and
recursive_rejection_thresholds (its introspection).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import dists_signature, triton_backend, why_not_float64_dists
from .reference import recursive_rejection_thresholds as _thresholds
from .reference import recursive_rejection_verify as _verify

__all__ = ["recursive_rejection_thresholds", "recursive_rejection_verify"]


def _load_verify() -> Callable[..., Any]:
    from .cpu_kernel import recursive_rejection_verify

    return recursive_rejection_verify


def _load_thresholds() -> Callable[..., Any]:
    from .cpu_kernel import recursive_rejection_thresholds

    return recursive_rejection_thresholds


def _load_triton_verify() -> Callable[..., Any]:
    from .launch import recursive_rejection_verify

    return recursive_rejection_verify


def _load_triton_thresholds() -> Callable[..., Any]:
    from .launch import recursive_rejection_thresholds

    return recursive_rejection_thresholds


_key = dists_signature(target=6, draft=7)
_why_not = why_not_float64_dists(target=6, draft=7)
recursive_rejection_verify = Op(
    "recursive_rejection_verify",
    _verify,
    [triton_backend(_load_triton_verify, _why_not), cpu_backend(_load_verify, op="recursive_rejection_verify")],
    key=_key,
    direct_backends=("triton",),
    overlaid="target",
)
recursive_rejection_thresholds = Op(
    "recursive_rejection_thresholds",
    _thresholds,
    [
        triton_backend(_load_triton_thresholds, _why_not),
        cpu_backend(_load_thresholds, op="recursive_rejection_thresholds"),
    ],
    key=_key,
    overlaid="target",
)
