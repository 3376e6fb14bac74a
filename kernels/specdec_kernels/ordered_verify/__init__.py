"""ordered_verify: rejection sampling over ordered proposals on trees, and ordered_thresholds, its introspection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Op
from ..extension import cpu_backend
from ..triton_backend import laws_half_or_single, laws_key, triton_backend
from .reference import ordered_thresholds as _thresholds
from .reference import ordered_verify as _verify

__all__ = ["ordered_thresholds", "ordered_verify"]


def _load_verify() -> Callable[..., Any]:
    from .cpu_kernel import ordered_verify

    return ordered_verify


def _load_thresholds() -> Callable[..., Any]:
    from .cpu_kernel import ordered_thresholds

    return ordered_thresholds


def _load_triton_verify() -> Callable[..., Any]:
    from .launch import ordered_verify

    return ordered_verify


def _load_triton_thresholds() -> Callable[..., Any]:
    from .launch import ordered_thresholds

    return ordered_thresholds


_key = laws_key(target=6, draft=7)
_why_not = laws_half_or_single(target=6, draft=7)
ordered_verify = Op(
    "ordered_verify",
    _verify,
    [triton_backend(_load_triton_verify, _why_not), cpu_backend(_load_verify, op="ordered_verify")],
    key=_key,
    direct=("triton",),
    edited="target",
)
ordered_thresholds = Op(
    "ordered_thresholds",
    _thresholds,
    [triton_backend(_load_triton_thresholds, _why_not), cpu_backend(_load_thresholds, op="ordered_thresholds")],
    key=_key,
    edited="target",
)
