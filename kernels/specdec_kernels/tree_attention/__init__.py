"""Attention of packed token trees over a paged cache. See `tree_attention` for the contract."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ..dispatch import Backend, Op
from ..extension import cpu_backend, on_device
from ..triton_backend import triton_backend
from . import sdpa_kernel
from .reference import tree_attention as _reference

__all__ = ["tree_attention"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import tree_attention

    return tree_attention


def _load_triton() -> Callable[..., Any]:
    from .launch import tree_attention

    return tree_attention


def _one_dtype(query: Tensor, key_cache: Tensor, *args: Any, **kwargs: Any) -> str | None:
    if key_cache.dtype != query.dtype or kwargs.get("key_scale") is not None:
        return f"the cache is {key_cache.dtype}, perhaps with scales; served is {query.dtype} without"
    return None


def _why_not_sdpa(*args: Any, **kwargs: Any) -> str | None:
    return on_device("cpu", args) or _one_dtype(*args, **kwargs) or sdpa_kernel.why_not(*args, **kwargs)


def _why_not_triton(*args: Any, **kwargs: Any) -> str | None:
    from .launch import why_not

    return why_not(*args, **kwargs)


def _key(query: Tensor, key_cache: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    large = query.shape[0] >= sdpa_kernel.LARGE
    if query.is_cpu and len(kwargs) == 1 and not large:  # only `scale`: the common decoding step
        return query.dtype if key_cache.dtype == query.dtype else (query.dtype, key_cache.dtype)
    softcap, sinks, lse = kwargs.get("softcap", 0.0), kwargs.get("sinks"), kwargs.get("return_lse", False)
    options = bool(softcap), sinks is None, lse, kwargs.get("batch_invariant", False), kwargs.get("key_scale") is None
    return query.device, query.dtype, key_cache.dtype, large, query.shape[-1], *options


tree_attention = Op(
    "tree_attention",
    _reference,
    [
        triton_backend(_load_triton, _why_not_triton),
        Backend("sdpa", lambda: sdpa_kernel.tree_attention, _why_not_sdpa, not_worth=sdpa_kernel.not_worth),
        cpu_backend(_load_cpu, _one_dtype, op="tree_attention"),
    ],
    key=_key,
)
