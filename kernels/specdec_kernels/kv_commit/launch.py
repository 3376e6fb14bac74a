"""Launch of the Triton kv_commit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..machine_code import Variant
from .cache_table import CacheTable

BLOCK, ROUND = 256, 8


def why_not(caches: Sequence[Tensor] | CacheTable, *args: object, **kwargs: object) -> str | None:
    if not isinstance(caches, CacheTable):
        return "a list of caches; a CacheTable made from it once keeps its addresses on the device"
    if caches.slot is None:
        return "the slots of these caches differ in size"
    return None


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
    """The operator in one launch for all caches. Data is not checked: what lies beyond the cache is not moved."""
    from .triton_kernel import commit

    assert isinstance(caches, CacheTable) and caches.slot is not None  # why_not has seen to it
    if (rows is None) != (cache_lengths is None):
        raise ValueError("kv_commit: rows and cache_lengths go together, expected int32 [B] and int32 [R], or neither")
    batch = lengths.shape[0]
    given = {"page_table": page_table, "lengths": lengths, "path": path, "offsets": offsets, "accepted": num_accepted}
    for name, each in given.items():
        fits = each.shape[0] == batch + (name == "offsets") and each.ndim == (
            2 if name in ("page_table", "path") else 1
        )
        if each.dtype != torch.int32 or not fits or not each.is_contiguous():
            raise ValueError(
                f"kv_commit: {name} is {each.dtype} {list(each.shape)}; expected contiguous int32 for {batch} rows"
            )
    if batch == 0:
        return
    runs, run, unit = caches.slot
    with torch.cuda.device_of(page_table):
        commit[(batch, len(caches), -(-runs * run // BLOCK))](
            caches.device_layout, page_table, lengths, path, offsets, num_accepted, rows, cache_lengths,
            page_table.shape[1], path.shape[1], caches.pages,
            PAGE=caches.page_size, RUNS=runs, RUN=run, UNIT=unit, BLOCK=BLOCK, ROUND=ROUND,
            ADVANCE=rows is not None, num_warps=4,
        )  # fmt: skip


VARIANTS = [
    Variant(
        f"kv_commit/{name}",
        "kv_commit.triton_kernel:commit",
        {
            "layout": "*i64",
            **dict.fromkeys(("page_table", "lengths", "path", "offsets", "accepted", "rows", "cache_lengths"), "*i32"),
            **dict.fromkeys(("columns", "path_width", "pages"), "i32"),
        },
        {"PAGE": 16, "RUNS": runs, "RUN": run, "UNIT": 4, "BLOCK": BLOCK, "ROUND": ROUND, "ADVANCE": True},
        stages=1,
        everyday=everyday,
    )
    for name, runs, run, everyday in (("8 heads of 128", 1, 512, ("sm_90",)), ("head first", 8, 64, ()))
]
