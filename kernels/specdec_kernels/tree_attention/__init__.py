"""Attention of packed token trees over a paged cache. See `tree_attention` for the contract."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ..dispatch import Backend, Op
from ..extension import cpu_backend, on_device
from . import sdpa_kernel
from .reference import tree_attention as _reference

__all__ = ["tree_attention"]


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import tree_attention

    return tree_attention


def _why_not_sdpa(*args: Any, **kwargs: Any) -> str | None:
    return on_device("cpu", args) or sdpa_kernel.why_not(*args, **kwargs)


def _key(query: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    large = query.shape[0] >= sdpa_kernel.LARGE
    if query.is_cpu and len(kwargs) == 1 and not large:  # only `scale`: the common decoding step
        return query.dtype
    softcap, sinks, lse = kwargs.get("softcap", 0.0), kwargs.get("sinks"), kwargs.get("return_lse", False)
    return query.device, query.dtype, large, bool(softcap), sinks is None, lse


tree_attention = Op(
    "tree_attention",
    _reference,
    [
        Backend("sdpa", lambda: sdpa_kernel.tree_attention, _why_not_sdpa, not_worth=sdpa_kernel.not_worth),
        cpu_backend(_load_cpu, op="tree_attention"),
    ],
    key=_key,
)
