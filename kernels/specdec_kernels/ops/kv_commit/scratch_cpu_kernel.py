"""C++ and CUDA backends of kv_commit_scratch. A module of its own, because `torch.compiler` is slow to import."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache_table import CacheTable, make_tables

_commit_table = torch.ops.specdec.kv_commit_table.default


@torch.compiler.disable(
    reason="kv_commit_scratch writes to caches that its schema does not name; call it between graphs"
)
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
    """Calls the C++ operator on the table of the caches and that of the scratch."""
    into, out_of = make_tables(caches, scratch)
    size = (into.pages, into.page_size, out_of.page_size)
    rest = (page_table, lengths, path, offsets, num_accepted, rows, cache_lengths)
    _commit_table(into.device_layout, out_of.device_layout, *size, *rest)
