"""C++ and CUDA backends of commits within a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .cache_table import CacheTable

_commit = torch.ops.specdec.kv_commit.default
_commit_table = torch.ops.specdec.kv_commit_table.default
kv_commit_pages = torch.ops.specdec.kv_commit_pages.default


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
    """Calls the C++ operator on a cache table, or on a list of caches."""
    rest = (page_table, lengths, path, offsets, num_accepted, rows, cache_lengths)
    if isinstance(caches, CacheTable) and not is_compiling():
        _commit_table(caches.device_layout, caches.device_layout, caches.pages, caches.page_size, 0, *rest)
    else:
        _commit(list(caches), *rest)  # its schema names what is written, which a compiler needs
