"""Operators traversal_verify (leaf-to-root verification on trees) and traversal_thresholds (its introspection)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from ...triton_shared.triton_backend import dists_signature, triton_backend, why_not_float64_dists
from .reference import traversal_thresholds as _thresholds
from .reference import traversal_verify as _verify

__all__ = ["traversal_thresholds", "traversal_verify"]


def _load_verify() -> Callable[..., Any]:
    from .cpu_kernel import traversal_verify

    return traversal_verify


def _load_thresholds() -> Callable[..., Any]:
    from .cpu_kernel import traversal_thresholds

    return traversal_thresholds


def _load_triton_verify() -> Callable[..., Any]:
    from .launch import traversal_verify

    return traversal_verify


def _load_triton_thresholds() -> Callable[..., Any]:
    from .launch import traversal_thresholds

    return traversal_thresholds


_key = dists_signature(target=6, draft=7)
_why_not = why_not_float64_dists(target=6, draft=7)
traversal_verify = Op(
    "traversal_verify",
    _verify,
    [triton_backend(_load_triton_verify, _why_not), cpu_backend(_load_verify, op="traversal_verify")],
    key=_key,
    direct_backends=("triton",),
    overlaid="target",
)
traversal_thresholds = Op(
    "traversal_thresholds",
    _thresholds,
    [triton_backend(_load_triton_thresholds, _why_not), cpu_backend(_load_thresholds, op="traversal_thresholds")],
    key=_key,
    overlaid="target",
)
