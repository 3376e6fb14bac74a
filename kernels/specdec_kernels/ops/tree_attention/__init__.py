"""tree_attention: attention of packed token trees over a paged cache. attention_plan: its plan of equal shares."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend, why_not_on_device
from ...dispatch.operator import Backend, Op, lazy_import
from ...triton_shared.triton_backend import triton_backend
from . import sdpa_kernel
from .plan import AttentionPlan
from .plan import attention_plan as _plan_reference
from .reference import check_data
from .reference import tree_attention as _reference

__all__ = ["AttentionPlan", "attention_plan", "plan_for", "tree_attention"]


def _one_dtype(query: Tensor, key_cache: Tensor, *args: Any, **kwargs: Any) -> str | None:
    scaled = kwargs.get("key_scale") is not None or kwargs.get("value_scale") is not None
    if key_cache.dtype != query.dtype or scaled:
        return f"the cache is {key_cache.dtype}, perhaps with scales; served is {query.dtype} without"
    return None


def _why_not_sdpa(*args: Any, **kwargs: Any) -> str | None:
    return (
        why_not_on_device("cpu", (*args, *kwargs.values()))
        or _one_dtype(*args, **kwargs)
        or sdpa_kernel.why_not(*args, **kwargs)
    )


def _why_not_triton(*args: Any, **kwargs: Any) -> str | None:
    from .launch import why_not

    return why_not(*args, **kwargs)


def _key(query: Tensor, key_cache: Tensor, *args: Any, **kwargs: Any) -> Hashable:
    try:
        large = query.shape[0] >= sdpa_kernel.LARGE
        if query.is_cpu and len(kwargs) == 1 and not large:  # only `scale`: the common decoding step
            return query.dtype if key_cache.dtype == query.dtype else (query.dtype, key_cache.dtype)
        softcap, sinks, lse = kwargs.get("softcap", 0.0), kwargs.get("sinks"), kwargs.get("return_lse", False)
        scales = kwargs.get("key_scale") is None, kwargs.get("value_scale") is None
        options = bool(softcap), sinks is None, lse, kwargs.get("batch_invariant", False), *scales
        return query.device, query.dtype, key_cache.dtype, large, query.shape[-1], *options
    except AttributeError:
        wrong = "key_cache" if isinstance(query, Tensor) else "query"
        raise ValueError(
            f"tree_attention: {wrong} is no tensor; expected [nodes, heads, width] and paged caches"
        ) from None


tree_attention = Op(
    "tree_attention",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:tree_attention"), _why_not_triton),
        Backend("sdpa", lambda: sdpa_kernel.tree_attention, _why_not_sdpa, not_worth=sdpa_kernel.not_worth),
        cpu_backend(lazy_import(__name__, "cpu_kernel:tree_attention"), _one_dtype, op="tree_attention"),
    ],
    key=_key,
    check_data=check_data,
)
attention_plan = Op(
    "attention_plan", _plan_reference, [triton_backend(lazy_import(__name__, "stream_k:attention_plan"))]
)


def plan_for(
    query: Tensor,
    key_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    ancestors: Tensor | None = None,
    *,
    window: int = 0,
    out: Tensor | None = None,
) -> AttentionPlan | None:
    """Makes the plan of `tree_attention` calls with tensors of these shapes, for all layers of a pass.

    Args:
        query: Queries, [M, H, D]. Of query, caches and page table only shapes and dtypes count.
        key_cache: Keys, [pages, page_size, Hkv, D].
        page_table: Pages of each request, int32 [B, P].
        lengths: Committed tokens of each request, int32 [B].
        offsets: First node of each request, int32 [B + 1].
        ancestors: Ancestor words, int32 [M, W]; None for causal calls.
        window: Sliding window of the calls, 0 for none.
        out: Memory of the plan; see `attention_plan`.

    Returns:
        The plan. None if the backend of the calls uses none, or requests may be too long to number their tiles.
    """
    if tree_attention.choose_backend(query, key_cache, page_table, lengths, offsets, scale=1.0) != "triton":
        return None
    from .launch import fits_plan, plan_numbers

    if not fits_plan(query, key_cache, page_table):
        return None
    numbers = plan_numbers(query, key_cache, page_table)
    nodes, causal = query.shape[0], ancestors is None
    plan: AttentionPlan = attention_plan(lengths, offsets, nodes, **numbers, causal=causal, window=window, out=out)
    return plan
