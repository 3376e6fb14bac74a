"""ordered_verify: rejection sampling over ordered proposals on trees, and ordered_thresholds, its introspection."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ..dispatch import Op
from ..extension import cpu_backend
from .reference import ordered_thresholds as _thresholds
from .reference import ordered_verify as _verify

__all__ = ["ordered_thresholds", "ordered_verify"]


def _load_verify() -> Callable[..., Any]:
    from .cpu_kernel import ordered_verify

    return ordered_verify


def _load_thresholds() -> Callable[..., Any]:
    from .cpu_kernel import ordered_thresholds

    return ordered_thresholds


def _key(tokens: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    return tokens.device.type


ordered_verify = Op("ordered_verify", _verify, [cpu_backend(_load_verify, op="ordered_verify")], key=_key)
ordered_thresholds = Op(
    "ordered_thresholds", _thresholds, [cpu_backend(_load_thresholds, op="ordered_thresholds")], key=_key
)
