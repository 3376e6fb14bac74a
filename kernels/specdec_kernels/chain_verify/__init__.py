"""chain_verify: the token and the block rule on chains; chain_verify_logits: the same with law_stats in it;
chain_thresholds: their introspection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Op
from ..extension import cpu_backend
from ..triton_backend import laws_half_or_single, laws_key, triton_backend
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


def _load_triton_verify() -> Callable[..., Any]:
    from .launch import chain_verify

    return chain_verify


def _load_triton_thresholds() -> Callable[..., Any]:
    from .launch import chain_thresholds

    return chain_thresholds


def _load_triton_logits() -> Callable[..., Any]:
    from .launch import chain_verify_logits

    return chain_verify_logits


_LAWS = {"target": 4, "draft": 5}
_LOGITS = {"logits": 4, "draft": 6}
_key = laws_key(**_LAWS)
_why_not = laws_half_or_single(**_LAWS)
chain_verify = Op(
    "chain_verify",
    _verify,
    [triton_backend(_load_triton_verify, _why_not), cpu_backend(_load_verify, op="chain_verify")],
    key=_key,
    direct=("triton",),
    edited="target",
)
chain_verify_logits = Op(
    "chain_verify_logits",
    _verify_logits,
    [
        triton_backend(_load_triton_logits, laws_half_or_single(**_LOGITS)),
        cpu_backend(_load_verify_logits, op="chain_verify_logits"),
    ],
    key=laws_key(**_LOGITS),
    direct=("triton",),
    edited="logits",
)
chain_thresholds = Op(
    "chain_thresholds",
    _thresholds,
    [triton_backend(_load_triton_thresholds, _why_not), cpu_backend(_load_thresholds, op="chain_thresholds")],
    key=_key,
    edited="target",
)
