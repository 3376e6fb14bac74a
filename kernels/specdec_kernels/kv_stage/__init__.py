"""Writes new keys and values into their slots of a paged cache. See `kv_stage` for the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Op
from ..extension import cpu_backend, cuda_backend
from .reference import kv_stage as _reference


def _load() -> Callable[..., Any]:  # the operator itself tells CPU from CUDA by its tensors
    from .cpu_kernel import kv_stage

    return kv_stage


kv_stage = Op("kv_stage", _reference, [cuda_backend(_load), cpu_backend(_load, op="kv_stage")])

__all__ = ["kv_stage"]
