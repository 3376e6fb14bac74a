"""Slides accepted nodes to the front of their row in all layers of a cache. `kv_commit` has the contract."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ..dispatch import Op
from ..extension import cpu_backend, cuda_backend
from .cache_table import CacheTable
from .reference import kv_commit as _reference


def _load() -> Callable[..., Any]:  # the operator itself tells CPU from CUDA by its tensors
    from .cpu_kernel import kv_commit

    return kv_commit


def _key(caches: Any, page_table: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    return page_table.is_cpu or page_table.device


kv_commit = Op("kv_commit", _reference, [cuda_backend(_load), cpu_backend(_load, op="kv_commit")], key=_key)

__all__ = ["CacheTable", "kv_commit"]
