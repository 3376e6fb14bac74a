"""Plain PyTorch definitions of kv_commit, kv_commit_scratch and kv_commit_pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .cache_table import CacheTable


def check_rows_and_lengths(op: str, lengths: Tensor, rows: Tensor | None, cache_lengths: Tensor | None) -> None:
    """Raises ValueError for rows without cache_lengths or the reverse, and for lengths that overlap cache_lengths."""
    if (rows is None) != (cache_lengths is None):
        raise ValueError(f"{op}: rows and cache_lengths go together, expected int32 [B] and int32 [R], or neither")
    if cache_lengths is not None:
        check_no_overlap(op, ("lengths", lengths), ("cache_lengths", cache_lengths))


def check_no_overlap(op: str, one: tuple[str, Tensor], other: tuple[str, Tensor]) -> None:
    """Raises ValueError if two tensors, each with its name, share memory."""
    begins = one[1].data_ptr(), other[1].data_ptr()
    sizes = one[1].nbytes, other[1].nbytes
    if all(sizes) and begins[0] < begins[1] + sizes[1] and begins[1] < begins[0] + sizes[0]:
        raise ValueError(
            f"{op}: {one[0]} and {other[0]} are the same memory, expected other memory; pass a copy of the first, "
            "as kv_slots makes it"
        )


def check_commit_data(
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
    """Raises ValueError for data that a commit cannot follow. `held`: nodes of a scratch, or None."""
    room = page_table.shape[1] * page_size
    for row in range(lengths.shape[0]):
        first, end, length = int(offsets[row]), int(offsets[row + 1]), int(lengths[row])
        nodes = select_kept_nodes(path, num_accepted, row)
        last = length + (len(nodes) if held is not None else end - first) if len(nodes) else 0
        used = page_table[row, : -(-max(last, 0) // page_size)]
        own, accepted = 0 if rows is None else int(rows[row]), int(num_accepted[row])
        for name, good, got, expected in (
            ("num_accepted", 0 <= accepted < path.shape[1], accepted, "less than the path's width"),
            ("path", bool(((nodes >= first) & (nodes < end)).all()), nodes.tolist(), f"nodes {first} to {end - 1}"),
            ("path", held is None or bool((nodes < held).all()), nodes.tolist(), f"nodes below {held}, the scratch's"),
            ("lengths", length >= 0 and last <= room, length, f"space for its nodes in {room} slots"),
            ("page_table", bool(((used >= 0) & (used < pages)).all()), used.tolist(), f"page ids below {pages}"),
            ("rows", cache_lengths is None or 0 <= own < cache_lengths.shape[0], own, "a row of cache_lengths"),
        ):
            if not good:
                raise ValueError(f"{op}: {name} of row {row} is {got}; expected {expected}; use what the verify "
                                 "operators and kv_slots return")  # fmt: skip


def check_in_place_data(caches: Sequence[Tensor], *trees: Any, **named: Any) -> None:
    """Raises ValueError for data that `kv_commit` cannot follow."""
    check_commit_data("kv_commit", *caches[0].shape[:2], *trees, **named)


def check_scratch_data(caches: Sequence[Tensor], scratch: Sequence[Tensor], *trees: Any, **named: Any) -> None:
    """Raises ValueError for data that `kv_commit_scratch` cannot follow."""
    held = scratch[0].shape[1] if isinstance(scratch, CacheTable) else scratch[0].shape[0]
    check_commit_data("kv_commit_scratch", *caches[0].shape[:2], *trees, **{**named, "held": held})


def check_pages_data(page_table: Tensor, *trees: Any, cache_page_table: Any = None, **named: Any) -> None:
    """Raises ValueError for data that `kv_commit_pages` cannot follow. Page ids are only moved, so any is valid."""
    check_commit_data("kv_commit_pages", 2**31 - 1, 1, page_table, *trees[:6], **named)


def select_kept_nodes(path: Tensor, num_accepted: Tensor, row: int) -> Tensor:
    """Returns the nodes that a request keeps, int64: its path up to num_accepted, or up to an earlier -1."""
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
    """Moves the accepted nodes of every request to the front of its staged slots, in all layers, in place.

    For i in 0..num_accepted[b], slot lengths[b] + (path[b, i] - offsets[b]) moves to slot lengths[b] + i. All other
    staged nodes are thereby dropped.

    Args:
        caches: Tensors [pages, page_size, ...] of any dtypes that share one page table, usually keys, values and any
            scales of all layers. A `CacheTable`, made once, makes calls cheaper and replayable in a graph.
        page_table: Pages of each request, int32 [B, P].
        lengths: Committed tokens before this commit, int32 [B].
        path: Packed node indices as the verify operators return them, int32 [B, D + 1]: root first, increasing, padded
            with -1. A request whose path begins with -1 is left alone.
        offsets: First node of each request, int32 [B + 1].
        num_accepted: Accepted nodes behind the root, int32 [B], at most D.
        rows: Row of each request in `cache_lengths`, int32 [B]; both or neither.
        cache_lengths: Lengths of the cache, int32 [R], in other memory than `lengths`. cache_lengths[rows[b]] becomes
            lengths[b] plus the kept tokens, in place. Without it the caller updates lengths.

    Raises:
        ValueError: If shapes, dtypes or data do not fit.
    """
    check_rows_and_lengths("kv_commit", lengths, rows, cache_lengths)
    check_in_place_data(caches, page_table, lengths, path, offsets, num_accepted, rows, cache_lengths)
    page_size = caches[0].shape[1]
    for row in range(lengths.shape[0]):
        nodes = select_kept_nodes(path, num_accepted, row)
        length, table = int(lengths[row]), page_table[row].long()
        source = length + nodes - int(offsets[row])
        target = length + torch.arange(len(nodes), device=nodes.device)
        for cache in caches:
            # indexing copies, so overlap is safe
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
    """Copies the accepted nodes of every request from a scratch to behind its committed slots, in all layers.

    For i in 0..num_accepted[b], node path[b, i] of every scratch goes to slot lengths[b] + i of its cache. The cache
    needs space for accepted nodes only.

    Args:
        caches: As in `kv_commit`.
        scratch: One tensor [M, ...] per cache, of its dtype and slot shape (strides may differ), or a `CacheTable` made
            once by `CacheTable.packed`.
        page_table: As in `kv_commit`.
        lengths: As in `kv_commit`.
        path: As in `kv_commit`.
        offsets: As in `kv_commit`.
        num_accepted: As in `kv_commit`.
        rows: As in `kv_commit`.
        cache_lengths: As in `kv_commit`.

    Raises:
        ValueError: If shapes, dtypes or data do not fit.
    """
    check_rows_and_lengths("kv_commit_scratch", lengths, rows, cache_lengths)
    check_scratch_data(caches, scratch, page_table, lengths, path, offsets, num_accepted, rows, cache_lengths)
    page_size = caches[0].shape[1]
    for row in range(lengths.shape[0]):
        nodes = select_kept_nodes(path, num_accepted, row)
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
    """Commits in a cache whose pages hold one slot each: page ids move, keys and values stay in place.

    In row rows[b] of the cache's page table, pages of accepted nodes move behind those of committed tokens, and pages
    of other nodes behind them, each in staging order. No page is lost; the last ones can be freed or reused.

    Args:
        page_table: Page tables of the requests as `kv_slots` returns them, int32 [B, P], in other memory than
            `cache_page_table`.
        lengths: As in `kv_commit`.
        path: As in `kv_commit`.
        offsets: As in `kv_commit`.
        num_accepted: As in `kv_commit`.
        rows: Row of each request in the cache, int32 [B].
        cache_lengths: Lengths of the cache, int32 [R], written in place.
        cache_page_table: Page table of the cache, int32 [R, P], written in place.

    Raises:
        ValueError: If shapes, dtypes or data do not fit.
    """
    check_rows_and_lengths("kv_commit_pages", lengths, rows, cache_lengths)
    check_no_overlap("kv_commit_pages", ("page_table", page_table), ("cache_page_table", cache_page_table))
    check_pages_data(page_table, lengths, path, offsets, num_accepted, rows, cache_lengths)
    for row in range(lengths.shape[0]):
        accepted = select_kept_nodes(path, num_accepted, row) - int(offsets[row])
        length, count = int(lengths[row]), int(offsets[row + 1] - offsets[row])
        others = torch.ones(count, dtype=torch.bool, device=lengths.device).index_fill_(0, accepted, False).nonzero()
        order = torch.cat([accepted, others.flatten()])
        own = int(rows[row])
        cache_page_table[own, length : length + count] = page_table[row, length + order]
        cache_lengths[own] = length + len(accepted)
