"""Triton backends of kv_commit, kv_commit_scratch and kv_commit_pages: argument checks, launches, variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...triton_shared.aot_config import Variant
from .cache_table import CacheTable, make_tables
from .reference import check_no_overlap, check_rows_and_lengths

BLOCK, SLOTS_AT_ONCE = 256, 8
WARPS = 8
"""Warps of a program. With fewer, older versions of ptxas spill."""
WORD = 4
"""Bytes of a unit if a whole cache is aligned to 16 bytes; else bytes are copied one by one."""


def _check_integers(op: str, device: torch.device, *named: tuple[str, Tensor, int, int]) -> None:
    """Raises ValueError unless tensors are contiguous int32 of these rows and dimensions on the device."""
    for name, given, rows, dimensions in named:
        if (
            given.dtype != torch.int32
            or given.ndim != dimensions
            or given.shape[0] != rows
            or not given.is_contiguous()
            or given.device != device
        ):
            raise ValueError(
                f"{op}: {name} is {given.dtype} {list(given.shape)} on {given.device}; expected contiguous int32 of "
                f"{rows} rows and {dimensions} dimensions on {device}"
            )


def _check_trees(op: str, device: torch.device, *trees: Tensor) -> None:
    """Checks page table, lengths, path, offsets and num_accepted of a commit."""
    table, lengths, path, offsets, accepted = trees
    batch = lengths.shape[0]
    _check_integers(
        op, device, ("page_table", table, batch, 2), ("lengths", lengths, batch, 1), ("path", path, batch, 2)
    )
    _check_integers(op, device, ("offsets", offsets, batch + 1, 1), ("num_accepted", accepted, batch, 1))


def _commit(
    op: str, into: CacheTable, out_of: CacheTable | None, rows: Tensor | None, cache_lengths: Tensor | None,
    *trees: Tensor,
) -> None:  # fmt: skip
    """Launches a commit inside caches, or out of a scratch."""
    from .triton_kernel import commit_nodes

    layout = into.device_layout
    scratch, device = layout if out_of is None else out_of.device_layout, layout.device
    check_rows_and_lengths(op, trees[1], rows, cache_lengths)
    _check_trees(op, device, *trees)
    if scratch.device != device:
        raise ValueError(f"{op}: the scratch is on {scratch.device}; expected {device} like the caches; move it")
    batch, path_width = trees[2].shape
    if batch == 0:
        return
    if rows is not None and cache_lengths is not None:
        _check_integers(
            op, device, ("rows", rows, batch, 1), ("cache_lengths", cache_lengths, cache_lengths.shape[0], 1)
        )
    commit_nodes[(batch, len(into), -(-max(into.slot_bytes) // (WORD * BLOCK)))](
        layout, scratch, *trees, rows, cache_lengths, trees[0].shape[1], path_width, into.pages,
        0 if out_of is None else out_of.page_size, 0 if cache_lengths is None else cache_lengths.shape[0],
        PAGE_SIZE=into.page_size, BLOCK=BLOCK, SLOTS_AT_ONCE=SLOTS_AT_ONCE,
        ADVANCE=rows is not None, FROM_SCRATCH=out_of is not None, num_warps=WARPS,
    )  # fmt: skip


def kv_commit(
    caches: Sequence[Tensor] | CacheTable,
    page_table: Tensor,
    lengths: Tensor,
    path: Tensor,
    offsets: Tensor,
    num_accepted: Tensor,
    rows: Tensor | None = None,
    cache_lengths: Tensor | None = None,
) -> None:
    """Runs the operator in one launch for all caches. Data is not checked; nodes beyond the cache are not moved."""
    assert isinstance(caches, CacheTable)  # why_not refuses lists
    _commit("kv_commit", caches, None, rows, cache_lengths, page_table, lengths, path, offsets, num_accepted)


def kv_commit_scratch(
    caches: Sequence[Tensor] | CacheTable,
    scratch: Sequence[Tensor] | CacheTable,
    page_table: Tensor,
    lengths: Tensor,
    path: Tensor,
    offsets: Tensor,
    num_accepted: Tensor,
    rows: Tensor | None = None,
    cache_lengths: Tensor | None = None,
) -> None:
    """Runs the operator in one launch for all caches. Data is not checked; nodes beyond either are not copied."""
    tables = make_tables(caches, scratch)
    trees = (page_table, lengths, path, offsets, num_accepted)
    _commit("kv_commit_scratch", *tables, rows, cache_lengths, *trees)


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
    """Runs the operator in one launch. Data is not checked; page ids beyond the page table are not moved."""
    from .triton_kernel import commit_pages

    op, trees = "kv_commit_pages", (page_table, lengths, path, offsets, num_accepted)
    device = page_table.device
    _check_trees(op, device, *trees)
    batch, columns = page_table.shape
    capacity = cache_lengths.shape[0]
    _check_integers(op, device, ("rows", rows, batch, 1), ("cache_lengths", cache_lengths, capacity, 1))
    _check_integers(op, device, ("cache_page_table", cache_page_table, capacity, 2))
    check_rows_and_lengths(op, lengths, rows, cache_lengths)
    check_no_overlap(op, ("page_table", page_table), ("cache_page_table", cache_page_table))
    if cache_page_table.shape[1] != columns:
        raise ValueError(
            f"kv_commit_pages: cache_page_table is {list(cache_page_table.shape)}, expected {columns} columns like "
            "page_table"
        )
    if batch:
        commit_pages[(batch,)](
            *trees, rows, cache_lengths, cache_page_table, columns, path.shape[1], capacity,
            BLOCK=128, num_warps=4,
        )  # fmt: skip


_TREES = dict.fromkeys(
    ("page_table_ptr", "lengths_ptr", "path_ptr", "offsets_ptr", "num_accepted_ptr", "rows_ptr", "cache_lengths_ptr"),
    "*i32",
)


def _variant(name: str, scratch: bool) -> Variant:
    numbers = dict.fromkeys(("max_pages", "path_width", "num_pages", "scratch_nodes", "num_rows"), "i32")
    constants: dict[str, Any] = {"PAGE_SIZE": 16, "BLOCK": BLOCK, "SLOTS_AT_ONCE": SLOTS_AT_ONCE}
    arguments = {"layout_ptr": "*i64", "scratch_ptr": "*i64", **_TREES, **numbers}
    return Variant(
        f"kv_commit/{name}", "kv_commit.triton_kernel:commit_nodes", arguments,
        constants | {"ADVANCE": True, "FROM_SCRATCH": scratch}, WARPS, stages=1, everyday=() if scratch else ("sm_90",),
    )  # fmt: skip


VARIANTS = [
    _variant("in place", False),
    _variant("out of a scratch", True),
    Variant(
        "kv_commit/pages", "kv_commit.triton_kernel:commit_pages",
        {**_TREES, "cache_page_table_ptr": "*i32", **dict.fromkeys(("max_pages", "path_width", "num_rows"), "i32")},
        {"BLOCK": 128}, stages=1,
    ),
]  # fmt: skip
