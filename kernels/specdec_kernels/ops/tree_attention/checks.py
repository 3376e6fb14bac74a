"""Argument checks of tree_attention for all backends: types, shapes, dtypes, devices, strides and numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

OP = "tree_attention"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_numbers(softcap: float, window: int) -> None:
    """Raises ValueError for an invalid softcap or window."""
    if not (isinstance(softcap, (int, float)) and math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"{OP}: softcap is {softcap!r}, expected a finite number above 0, or 0 for none")
    if not isinstance(window, int) or window < 0:
        raise ValueError(f"{OP}: window is {window!r}, expected a number of positions, or 0 for none")


def check_arguments(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    ancestors: Tensor | None = None,
    depth: Tensor | None = None,
    *,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Raises ValueError for arguments that no backend can take. Reads no data."""
    check_numbers(softcap, window)
    integers = {
        "page_table": page_table, "lengths": lengths, "offsets": offsets, "ancestors": ancestors, "depth": depth,
    }  # fmt: skip
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    floats = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    for name, each in {**floats, **integers, **scales, "sinks": sinks, "out": out}.items():
        missing = each is None and (name in floats or name in ("page_table", "lengths", "offsets"))
        if missing or not (each is None or isinstance(each, Tensor)):
            raise ValueError(f"{OP}: {name} is {type(each).__name__}, expected a tensor")
    _check_floats(query, key_cache, value_cache, out)
    _check_integers(query, integers)
    if ancestors is not None and window and depth is None:
        raise ValueError(f"{OP}: window with ancestors needs depth; pass the depth of every node")
    _check_heads(query, key_cache.shape[2], sinks, scales)


def _check_floats(query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor | None) -> None:
    if query.ndim != 3 or query.dtype not in FLOATS:
        raise ValueError(
            f"{OP}: query is {query.dtype} {list(query.shape)}, expected [nodes, heads, width] of a float dtype; "
            "unflatten its heads"
        )
    heads, width = query.shape[1:]
    for name, each in (("key_cache", key_cache), ("value_cache", value_cache)):
        if each.ndim != 4 or each.shape != key_cache.shape or each.shape[3] != width or each.dtype != key_cache.dtype:
            raise ValueError(
                f"{OP}: {name} is {each.dtype} {list(each.shape)}, expected {key_cache.dtype} [pages, page_size, "
                f"kv_heads, {width}] like query and the other cache"
            )
    if key_cache.dtype not in (query.dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"{OP}: key_cache has dtype {key_cache.dtype}, expected {query.dtype} like query, or float8_e4m3fn"
        )
    kv_heads = key_cache.shape[2]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{OP}: query has {heads} heads, expected a multiple of the cache's {kv_heads}")
    for name, strided in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache), ("out", out)):
        if strided is None:
            continue
        if strided.device != query.device:
            raise ValueError(f"{OP}: {name} is on {strided.device}; expected {query.device} like query; move it")
        if strided.stride(-1) != 1 and strided.shape[-1] > 1:
            raise ValueError(f"{OP}: {name} has a strided last axis, expected a contiguous one; call .contiguous()")
    if out is not None and (out.shape != query.shape or out.dtype != query.dtype):
        raise ValueError(f"{OP}: out is {out.dtype} {list(out.shape)}, expected {query.dtype} {list(query.shape)}")


def _check_integers(query: Tensor, integers: dict[str, Tensor | None]) -> None:
    nodes, table = query.shape[0], integers["page_table"]
    batch = table.shape[0] if table is not None and table.ndim == 2 else -1
    expected = {"lengths": (batch,), "offsets": (batch + 1,), "depth": (nodes,)}
    for name, index in integers.items():
        if index is None:
            continue
        fits = index.ndim == 2 if name in ("page_table", "ancestors") else tuple(index.shape) == expected[name]
        fits = fits and (index.stride(-1) == 1 or index.shape[-1] <= 1)
        if index.dtype != torch.int32 or not fits or index.device != query.device:
            raise ValueError(
                f"{OP}: {name} is {index.dtype} {list(index.shape)} on {index.device}, expected int32 "
                f"{list(expected.get(name, ('rows', 'columns')))} on {query.device} with a contiguous last axis; call "
                ".contiguous()"
            )
    words = integers["ancestors"]
    if words is not None and (words.shape[0] != nodes or not words.is_contiguous()):
        raise ValueError(
            f"{OP}: ancestors is {list(words.shape)}, expected contiguous [{nodes}, W]; call .contiguous()"
        )


def _check_heads(query: Tensor, kv_heads: int, sinks: Tensor | None, scales: dict[str, Tensor | None]) -> None:
    if None in scales.values() and any(each is not None for each in scales.values()):
        raise ValueError(f"{OP}: key_scale and value_scale go together, expected float32 [Hkv] each or neither")
    for name, given, heads in (("sinks", sinks, query.shape[1]), *((n, each, kv_heads) for n, each in scales.items())):
        if given is None:
            continue
        good = given.dtype in FLOATS if name == "sinks" else given.dtype == torch.float32
        if not good or tuple(given.shape) != (heads,) or not given.is_contiguous() or given.device != query.device:
            raise ValueError(
                f"{OP}: {name} is {given.dtype} {list(given.shape)} on {given.device}, expected contiguous "
                f"float32 [{heads}] on {query.device}, one per {'query' if name == 'sinks' else 'key/value'} head"
            )
