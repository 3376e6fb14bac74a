"""tree_attention through torch's scaled_dot_product_attention: for large bfloat16 prefills on matrix units.

Gathers the pages of a row, then calls torch, whose oneDNN kernels use AMX or AVX512-BF16 instructions. The
C++ kernel computes in float32 and is faster everywhere else.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .checks import check_arguments
from .plan import AttentionPlan
from .reference import check_data, visible_nodes

LARGE = 256
"""Nodes of a call from which gathering pages pays off."""


@lru_cache(maxsize=1)
def matrix_units() -> bool:
    """Returns whether the processor multiplies bfloat16 matrices (AMX or AVX512-BF16)."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="ignore") as lines:
            flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def why_not(
    query: Tensor,
    *args: Any,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    **kwargs: Any,
) -> str | None:
    """Returns why torch's attention cannot serve a call, or None."""
    if batch_invariant:
        return "torch's attention adds keys in an order of its own"
    if softcap:
        return "torch's attention has no softcap"
    if sinks is not None:
        return "torch's attention has no sinks"
    if return_lse:
        return "torch's attention does not return the log-sum-exp"
    return None


def not_worth(query: Tensor, *args: Any, **kwargs: Any) -> str | None:
    """Returns why the C++ kernel is faster for a call, or None."""
    if query.dtype != torch.bfloat16:
        return f"pays for bfloat16 only, not {query.dtype}"
    if query.shape[0] < LARGE:
        return f"pays from {LARGE} nodes of all requests on, not {query.shape[0]}"
    if not matrix_units():
        return "this processor has neither AMX nor AVX512-BF16"
    return None


def row_mask(
    first: int,
    count: int,
    length: int,
    ancestors: Tensor | None,
    depth: Tensor | None,
    window: int,
    device: torch.device,
) -> Tensor:
    """Returns which slots of a request each node sees, bool [count, length + count]."""
    index = torch.arange(count, device=device)
    nodes = index[:, None] >= index if ancestors is None else visible_nodes(ancestors[first : first + count], count)
    visible = torch.cat([nodes.new_ones(count, length), nodes], dim=1)
    if window:
        of_nodes = length + (index if ancestors is None or depth is None else depth[first : first + count])
        of_keys = torch.cat([torch.arange(length, device=device), of_nodes])
        visible &= of_nodes[:, None] - of_keys < window
    return visible


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    ancestors: Tensor | None = None,
    depth: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    batch_invariant: bool = False,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Runs the operator request by request: gathers its pages and calls torch's attention."""
    tensors = (query, key_cache, value_cache, page_table, lengths, offsets, ancestors, depth)
    check_arguments(*tensors, softcap=softcap, window=window, sinks=sinks, out=out)
    check_data(*tensors)
    page_size, kv_heads = key_cache.shape[1:3]
    result = query.new_zeros(query.shape) if out is None else out.zero_()
    bounds = offsets.tolist()
    for row, length in enumerate(lengths.tolist()):
        first, count = bounds[row], bounds[row + 1] - bounds[row]
        if count == 0:
            continue
        pages = page_table[row, : (length + count + page_size - 1) // page_size].long()
        key, value = (
            cache[pages].flatten(0, 1)[: length + count].transpose(0, 1)[None] for cache in (key_cache, value_cache)
        )
        plain = ancestors is None and length == 0 and not window
        attended = scaled_dot_product_attention(
            query[first : first + count].transpose(0, 1)[None],
            key,
            value,
            attn_mask=None if plain else row_mask(first, count, length, ancestors, depth, window, query.device),
            is_causal=plain,
            scale=scale,
            enable_gqa=query.shape[1] != kv_heads,
        )
        result[first : first + count] = attended[0].transpose(0, 1)
    return result
