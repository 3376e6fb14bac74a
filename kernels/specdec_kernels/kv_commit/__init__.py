"""Slides accepted nodes to the front of their row in all layers of a cache. `kv_commit` has the contract."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ..dispatch import Op
from ..extension import cpu_backend, cuda_backend
from ..triton_backend import INTERPRETED, triton_backend
from .cache_table import CacheTable
from .reference import kv_commit as _reference


def _load() -> Callable[..., Any]:  # the operator itself tells CPU from CUDA by its tensors
    from .cpu_kernel import kv_commit

    return kv_commit


def _load_triton() -> Callable[..., Any]:
    from .launch import kv_commit

    return kv_commit


def _why_not_triton(caches: Any, page_table: Tensor, *args: Any, **kwargs: Any) -> str | None:
    from .launch import why_not

    return why_not(caches)


def _key(caches: Any, page_table: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    if page_table.is_cpu and not INTERPRETED:
        return True
    return page_table.device, isinstance(caches, CacheTable) and caches.slot is not None


kv_commit = Op(
    "kv_commit",
    _reference,
    [cuda_backend(_load), triton_backend(_load_triton, _why_not_triton), cpu_backend(_load, op="kv_commit")],
    key=_key,
)

__all__ = ["CacheTable", "kv_commit"]
