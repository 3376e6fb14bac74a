"""Commits of an accepted path in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .cache_table import CacheTable


def check_pair(op: str, lengths: Tensor, rows: Tensor | None, cache_lengths: Tensor | None) -> None:
    """Raises ValueError for one of rows and cache_lengths without the other, and for lengths in their memory."""
    if (rows is None) != (cache_lengths is None):
        raise ValueError(f"{op}: rows and cache_lengths go together, expected int32 [B] and int32 [R], or neither")
    if cache_lengths is not None:
        check_apart(op, ("lengths", lengths), ("cache_lengths", cache_lengths))


def check_apart(op: str, one: tuple[str, Tensor], other: tuple[str, Tensor]) -> None:
    """Raises ValueError for two tensors, each with its name, that have bytes in common."""
    begins = one[1].data_ptr(), other[1].data_ptr()
    sizes = one[1].nbytes, other[1].nbytes
    if all(sizes) and begins[0] < begins[1] + sizes[1] and begins[1] < begins[0] + sizes[0]:
        raise ValueError(
            f"{op}: {one[0]} and {other[0]} are the same memory, expected other memory; pass a copy of the first, "
            "as kv_slots makes it"
        )


def look(
    op: str,
    pages: int,
    page_size: int,
    page_table: Tensor,
    lengths: Tensor,
    path: Tensor,
    offsets: Tensor,
    num_accepted: Tensor,
    rows: Tensor | None = None,
    cache_lengths: Tensor | None = None,
    held: int | None = None,
) -> None:
    """Raises ValueError for data that a commit cannot follow. held: nodes of a scratch, None: they are in the cache."""
    room = page_table.shape[1] * page_size
    for row in range(lengths.shape[0]):
        first, end, length = int(offsets[row]), int(offsets[row + 1]), int(lengths[row])
        nodes = kept_nodes(path, num_accepted, row)
        last = length + (len(nodes) if held is not None else end - first) if len(nodes) else 0
        used = page_table[row, : -(-max(last, 0) // page_size)]
        own, accepted = 0 if rows is None else int(rows[row]), int(num_accepted[row])
        for name, good, got, expected in (
            ("num_accepted", 0 <= accepted < path.shape[1], accepted, "less than the path's width"),
            ("path", bool(((nodes >= first) & (nodes < end)).all()), nodes.tolist(), f"nodes {first} to {end - 1}"),
            ("path", held is None or bool((nodes < held).all()), nodes.tolist(), f"nodes below {held}, the scratch's"),
            ("lengths", length >= 0 and last <= room, length, f"room for its nodes in {room} slots"),
            ("page_table", bool(((used >= 0) & (used < pages)).all()), used.tolist(), f"page ids below {pages}"),
            ("rows", cache_lengths is None or 0 <= own < cache_lengths.shape[0], own, "a row of cache_lengths"),
        ):
            if not good:
                raise ValueError(f"{op}: {name} of row {row} is {got}; expected {expected}; use what the verify "
                                 "operators and kv_slots return")  # fmt: skip


def look_in_place(caches: Sequence[Tensor], *trees: Any, **named: Any) -> None:
    """What `kv_commit` cannot follow."""
    look("kv_commit", *caches[0].shape[:2], *trees, **named)


def look_scratch(caches: Sequence[Tensor], scratch: Sequence[Tensor], *trees: Any, **named: Any) -> None:
    """What `kv_commit_scratch` cannot follow."""
    held = scratch[0].shape[1] if isinstance(scratch, CacheTable) else scratch[0].shape[0]
    look("kv_commit_scratch", *caches[0].shape[:2], *trees, **{**named, "held": held})


def look_pages(page_table: Tensor, *trees: Any, cache_page_table: Any = None, **named: Any) -> None:
    """What `kv_commit_pages` cannot follow; page ids are only moved, so that any will do."""
    look("kv_commit_pages", 2**31 - 1, 1, page_table, *trees[:6], **named)


def kept_nodes(path: Tensor, num_accepted: Tensor, row: int) -> Tensor:
    """int64 nodes that a row keeps: its path up to num_accepted, or to where it ends before."""
    nodes = path[row, : int(num_accepted[row]) + 1]
    return nodes[: int((nodes >= 0).cumprod(0).sum())].long()


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

    caches: tensors [pages, page_size, ...] of any dtypes that share one page table, usually keys, values and, if they
        have any, scales of all layers; a sequence of tensors, or a `CacheTable` made from it once, which makes calls
        cheaper and lets a captured one be replayed
    page_table: int32 [B, P]; lengths: int32 [B], committed tokens before this commit
    path: int32 [B, D + 1], packed node indices, root first, increasing, -1 padded, as the verify operators
        return them; rows whose path starts with -1 are left alone
    offsets: int32 [B + 1]; num_accepted: int32 [B], at most D
    rows: int32 [B] and cache_lengths: int32 [R] (both or neither): cache_lengths[rows[b]] becomes lengths[b] plus the
        tokens that row b keeps, in place (a row that keeps none is truncated to lengths[b]); without them lengths are
        the caller's to advance. lengths is other memory than cache_lengths

    Raises: ValueError for shapes or dtypes that do not fit.
    """
    check_pair("kv_commit", lengths, rows, cache_lengths)
    look_in_place(caches, page_table, lengths, path, offsets, num_accepted, rows, cache_lengths)
    page_size = caches[0].shape[1]
    for row in range(lengths.shape[0]):
        nodes = kept_nodes(path, num_accepted, row)
        length, table = int(lengths[row]), page_table[row].long()
        source = length + nodes - int(offsets[row])
        target = length + torch.arange(len(nodes), device=nodes.device)
        for cache in caches:
            # Indexing makes a copy, so overlap does not matter.
            moved = cache[table[source // page_size], source % page_size]
            cache[table[target // page_size], target % page_size] = moved
        if rows is not None and cache_lengths is not None:
            cache_lengths[int(rows[row])] = length + len(nodes)


def kv_commit_scratch(
    caches: Sequence[Tensor],
    scratch: Sequence[Tensor],
    page_table: Tensor,
    lengths: Tensor,
    path: Tensor,
    offsets: Tensor,
    num_accepted: Tensor,
    rows: Tensor | None = None,
    cache_lengths: Tensor | None = None,
) -> None:
    """Copies the accepted nodes of every row behind its committed slots, in all layers, out of a scratch.

    For i in 0..num_accepted[b]: node path[b, i] of every scratch goes to slot lengths[b] + i of its cache. The cache
    needs room for accepted nodes only, and nothing has to be undone.

    scratch: one tensor [M, ...] per cache, of its dtype and slot shape (their axes may lie differently in memory); a
        sequence of tensors, or a `CacheTable` made by `CacheTable.packed` once
    Others: as in `kv_commit`.

    Raises: ValueError for shapes or dtypes that do not fit.
    """
    check_pair("kv_commit_scratch", lengths, rows, cache_lengths)
    look_scratch(caches, scratch, page_table, lengths, path, offsets, num_accepted, rows, cache_lengths)
    page_size = caches[0].shape[1]
    for row in range(lengths.shape[0]):
        nodes = kept_nodes(path, num_accepted, row)
        length, table = int(lengths[row]), page_table[row].long()
        target = length + torch.arange(len(nodes), device=nodes.device)
        for cache, held in zip(caches, scratch, strict=True):
            nodes_of = held[0] if isinstance(scratch, CacheTable) else held
            cache[table[target // page_size], target % page_size] = nodes_of[nodes]
        if rows is not None and cache_lengths is not None:
            cache_lengths[int(rows[row])] = length + len(nodes)


def kv_commit_pages(
    page_table: Tensor,
    lengths: Tensor,
    path: Tensor,
    offsets: Tensor,
    num_accepted: Tensor,
    rows: Tensor,
    cache_lengths: Tensor,
    cache_page_table: Tensor,
) -> None:
    """The commit of a cache whose pages hold one slot each: page ids move, keys and values stay where they are.

    In row rows[b] of the cache's page table the pages of the accepted nodes move behind those of the committed tokens,
    and the pages of the other nodes behind them, each in the order in which they were staged: no page is lost, and
    those to give back or to use again are the last ones.

    page_table: int32 [B, P], the rows' page tables as `kv_slots` hands them out: other memory than cache_page_table
    cache_page_table: int32 [R, P], written in place; cache_lengths: int32 [R], likewise; rows: int32 [B]
    Others: as in `kv_commit`.

    Raises: ValueError for shapes or dtypes that do not fit.
    """
    check_pair("kv_commit_pages", lengths, rows, cache_lengths)
    check_apart("kv_commit_pages", ("page_table", page_table), ("cache_page_table", cache_page_table))
    look_pages(page_table, lengths, path, offsets, num_accepted, rows, cache_lengths)
    for row in range(lengths.shape[0]):
        accepted = kept_nodes(path, num_accepted, row) - int(offsets[row])
        length, count = int(lengths[row]), int(offsets[row + 1] - offsets[row])
        others = torch.ones(count, dtype=torch.bool, device=lengths.device).index_fill_(0, accepted, False).nonzero()
        order = torch.cat([accepted, others.flatten()])
        own = int(rows[row])
        cache_page_table[own, length : length + count] = page_table[row, length + order]
        cache_lengths[own] = length + len(accepted)
