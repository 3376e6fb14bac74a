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
) -> None:
    if isinstance(caches, CacheTable):
        _commit_table(caches.layout, caches.pages, caches.page_size, page_table, lengths, path, offsets, num_accepted)
    else:
        _commit(caches, page_table, lengths, path, offsets, num_accepted)
