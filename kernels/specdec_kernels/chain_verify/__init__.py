"""chain_verify: the token and the block rule on chains, and chain_thresholds, their introspection."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ..dispatch import Op
from ..extension import cpu_backend
from .reference import BLOCK_RULE, CHOSEN, DRAWN, TOKEN
from .reference import chain_thresholds as _thresholds
from .reference import chain_verify as _verify

__all__ = ["BLOCK_RULE", "CHOSEN", "DRAWN", "TOKEN", "chain_thresholds", "chain_verify"]


def _load_verify() -> Callable[..., Any]:
    from .cpu_kernel import chain_verify

    return chain_verify


def _load_thresholds() -> Callable[..., Any]:
    from .cpu_kernel import chain_thresholds

    return chain_thresholds


def _key(tokens: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    return tokens.device.type


chain_verify = Op("chain_verify", _verify, [cpu_backend(_load_verify)], key=_key)
chain_thresholds = Op("chain_thresholds", _thresholds, [cpu_backend(_load_thresholds)], key=_key)
