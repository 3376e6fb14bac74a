"""traversal_verify: leaf-to-root verification on trees, and traversal_thresholds, its introspection."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ..dispatch import Op
from ..extension import cpu_backend
from .reference import traversal_thresholds as _thresholds
from .reference import traversal_verify as _verify

__all__ = ["traversal_thresholds", "traversal_verify"]


def _load_verify() -> Callable[..., Any]:
    from .cpu_kernel import traversal_verify

    return traversal_verify


def _load_thresholds() -> Callable[..., Any]:
    from .cpu_kernel import traversal_thresholds

    return traversal_thresholds


def _key(tokens: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    return tokens.device.type


traversal_verify = Op("traversal_verify", _verify, [cpu_backend(_load_verify, op="traversal_verify")], key=_key)
traversal_thresholds = Op(
    "traversal_thresholds", _thresholds, [cpu_backend(_load_thresholds, op="traversal_thresholds")], key=_key
)
