"""C++ backend of kv_commit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache_table import CacheTable

_commit = torch.ops.specdec.kv_commit.default
_commit_table = torch.ops.specdec.kv_commit_table.default


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
    if isinstance(caches, CacheTable):
        where, size = (caches.layout, caches.pages), caches.page_size
        _commit_table(*where, size, page_table, lengths, path, offsets, num_accepted, rows, cache_lengths)
    else:
        _commit(caches, page_table, lengths, path, offsets, num_accepted, rows, cache_lengths)
