"""chain_verify: the token and the block rule on chains; chain_verify_logits: the same with law_stats in it;
chain_thresholds: their introspection.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ..dispatch import Op
from ..extension import cpu_backend
from .reference import BLOCK_RULE, CHOSEN, DRAWN, TOKEN
from .reference import chain_thresholds as _thresholds
from .reference import chain_verify as _verify
from .reference import chain_verify_logits as _verify_logits

__all__ = ["BLOCK_RULE", "CHOSEN", "DRAWN", "TOKEN", "chain_thresholds", "chain_verify", "chain_verify_logits"]


def _load_verify() -> Callable[..., Any]:
    from .cpu_kernel import chain_verify

    return chain_verify


def _load_verify_logits() -> Callable[..., Any]:
    from .cpu_kernel import chain_verify_logits

    return chain_verify_logits


def _load_thresholds() -> Callable[..., Any]:
    from .cpu_kernel import chain_thresholds

    return chain_thresholds


def _key(tokens: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    return tokens.device.type


chain_verify = Op("chain_verify", _verify, [cpu_backend(_load_verify)], key=_key)
chain_verify_logits = Op("chain_verify_logits", _verify_logits, [cpu_backend(_load_verify_logits)], key=_key)
chain_thresholds = Op("chain_thresholds", _thresholds, [cpu_backend(_load_thresholds)], key=_key)
