"""Writes new keys and values into their slots of a paged cache. See `kv_stage` for the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Op
from ..extension import cpu_backend
from .reference import kv_stage as _reference


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import kv_stage

    return kv_stage


kv_stage = Op("kv_stage", _reference, [cpu_backend(_load_cpu, op="kv_stage")])

__all__ = ["kv_stage"]
