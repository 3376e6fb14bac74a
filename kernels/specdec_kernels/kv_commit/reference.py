"""Commit of an accepted path in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kv_commit(
    caches: Sequence[Tensor],
    page_table: Tensor,
    lengths: Tensor,
    path: Tensor,
    offsets: Tensor,
    num_accepted: Tensor,
    rows: Tensor | None = None,
    cache_lengths: Tensor | None = None,
) -> None:
    """Slides the accepted nodes of every row to the front of its staged slots, in all layers, in place.

    For i in 0..num_accepted[b]: slot lengths[b] + (path[b, i] - offsets[b]) moves to slot lengths[b] + i.
    Everything else that was staged is thereby forgotten.

    caches: tensors [pages, page_size, ...] of any dtypes that share one page table, usually keys and values
        of all layers; a sequence of tensors, or a `CacheTable` made from one once, which makes calls cheaper
    page_table: int32 [B, P]; lengths: int32 [B], committed tokens before this commit
    path: int32 [B, D + 1], packed node indices, root first, increasing, -1 padded, as the verify operators
        return them; rows whose path starts with -1 are left alone
    offsets: int32 [B + 1]; num_accepted: int32 [B], at most D
    rows: int32 [B] and cache_lengths: int32 [R] (both or neither): cache_lengths[rows[b]] becomes lengths[b] plus the
        tokens that row b keeps, in place; without them lengths are the caller's to advance

    Raises: ValueError for shapes or dtypes that do not fit.
    """
    if (rows is None) != (cache_lengths is None):
        raise ValueError("kv_commit: rows and cache_lengths go together, expected int32 [B] and int32 [R], or neither")
    page_size = caches[0].shape[1]
    for row in range(lengths.shape[0]):
        nodes = path[row, : int(num_accepted[row]) + 1]
        nodes = nodes[: int((nodes >= 0).cumprod(0).sum())].long()
        length, table = int(lengths[row]), page_table[row].long()
        source = length + nodes - int(offsets[row])
        target = length + torch.arange(len(nodes), device=nodes.device)
        for cache in caches:
            # Indexing makes a copy, so overlap does not matter.
            moved = cache[table[source // page_size], source % page_size]
            cache[table[target // page_size], target % page_size] = moved
        if rows is not None and cache_lengths is not None:
            cache_lengths[int(rows[row])] = length + len(nodes)
