"""Watches rollbacks by tensors, whose values the cache itself does not read."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from specdec_fast.cache.paged import PagedCache


class RollbackWatch:
    """Records rollbacks by tensors, without reading them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._seen: list[tuple[Tensor, Tensor]] = []
        rollback = PagedCache.rollback

        def watched(cache: PagedCache, rows: Any, lengths: Any) -> None:
            if isinstance(lengths, Tensor):
                self._seen.append((cache.lengths[rows.long()].clone(), lengths.clone()))
            rollback(cache, rows, lengths)

        patch.setattr(PagedCache, "rollback", watched)

    def check(self, least: int) -> None:
        """Asserts that there were at least that many rollbacks, none negative or longer than its row."""
        assert len(self._seen) >= least
        assert all((new >= 0).all() and (new <= before).all() for before, new in self._seen)
