"""Attention of packed trees by single operations in any dtype: exact in float64, and a measure of errors in others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from oracles.packed_trees import Batch, Shape, shapes


@st.composite
def measured_shapes(draw: st.DrawFn) -> Shape:
    """Draws ragged batches with at least one node, pages of 1 to 32 slots, short rows and prefills, some after long
    texts.
    """
    shape = draw(shapes(most_nodes=70))
    lengths = [draw(st.sampled_from([length, length, 500 + length])) for length in shape.lengths]
    counts = shape.counts if sum(shape.counts) else [2, *shape.counts[1:]]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return replace(shape, page_size=draw(st.integers(1, 32)), lengths=lengths, counts=counts, dtype=dtype)


def visible(length: int, parents: list[int], causal: bool, window: int) -> Tensor:
    """Returns the keys that each node of a row attends to, bool [nodes, length + nodes], from the nodes' parents."""
    count = len(parents)
    seen, depth = torch.zeros(count, count, dtype=torch.bool), list(range(count))
    for node, parent in enumerate(parents):
        if causal:
            seen[node, : node + 1] = True
            continue
        depth[node] = depth[parent] + 1 if parent >= 0 else 0
        seen[node] = seen[parent] if parent >= 0 else False
        seen[node, node] = True
    at = torch.cat([torch.arange(length), length + torch.tensor(depth, dtype=torch.int64)])
    near = at[length:, None] - at < window if window else torch.ones(count, length + count, dtype=torch.bool)
    return torch.cat([torch.ones(count, length, dtype=torch.bool), seen], 1) & near


def rows_of(case: Batch, dtype: torch.dtype) -> Iterator[tuple[slice, int, Tensor, Tensor]]:
    """Yields (nodes, length, keys [H, L, D], values [H, L, D]) of every row with nodes, gathered slot by slot."""
    group, size, start = case.shape.heads // case.shape.kv_heads, case.shape.page_size, 0
    for row, (length, count) in enumerate(zip(case.shape.lengths, case.shape.counts, strict=True)):
        at = torch.arange(length + count)
        pages, places = case.page_table[row].long()[at // size], at % size
        key, value = (
            c[pages, places].to(dtype).transpose(0, 1).repeat_interleave(group, 0)
            for c in (case.key_cache, case.value_cache)
        )
        if count:
            yield slice(start, start + count), row, key, value
        start += count


def eager_attention(
    case: Batch,
    dtype: torch.dtype,
    *,
    scale: float,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fused: bool = False,
) -> Tensor:
    """Returns [M, H, D] in dtype. fused: by torch's scaled_dot_product_attention, which has no softcap and no sinks."""
    found = torch.zeros(case.query.shape, dtype=dtype)
    for nodes, row, key, value in rows_of(case, dtype):
        query = case.query[nodes].to(dtype).transpose(0, 1)
        mask = visible(case.shape.lengths[row], case.parents[row], causal, window)
        if fused:
            found[nodes] = scaled_dot_product_attention(
                query[None], key[None], value[None], attn_mask=mask, scale=scale
            )[0].transpose(0, 1)
            continue
        scores = (query @ key.transpose(1, 2)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, scores.shape[1], 1)], 2)
        found[nodes] = (scores.softmax(2)[:, :, : key.shape[1]] @ value).transpose(0, 1)
    return found


def size(error: Tensor) -> tuple[float, float]:
    """Returns (root mean square, largest) of the errors of an output."""
    return float(error.square().mean().sqrt()), float(error.abs().max())


def errors(case: Batch, outputs: dict[str, Tensor], **given: Any) -> dict[str, tuple[float, float]]:
    """Returns the errors of each output against float64, and of torch's attention in the same dtype."""
    exact = eager_attention(case, torch.float64, **given)
    fused = not given.get("softcap") and given.get("sinks") is None
    measure = eager_attention(case, case.shape.dtype, **given, fused=fused)
    return {name: size(output.double() - exact) for name, output in {**outputs, "torch": measure}.items()}
