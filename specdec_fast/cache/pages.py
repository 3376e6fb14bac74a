"""Hands out pages of the key/value pool. Owns which page belongs to whom; knows nothing of tensors.

Page 0 is the trash page: padding nodes write there and nobody reads it. Tests: tests/cache/test_pages.py.
"""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """A free list over pages 1..num_pages-1 with reference counts (forked rows share whole pages)."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages: got {num_pages}; expected at least 2 (page 0 is the trash page)")
        self.num_pages = num_pages
        self._free: list[int] = []
        self._shares: list[int] = []
        self.reset()

    def reset(self) -> None:
        """All pages are free."""
        self._free = list(range(self.num_pages - 1, 0, -1))
        self._shares = [0] * self.num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._shares[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for pages that are in use."""
        for page in pages:
            if self._shares[page] < 1:
                raise ValueError(f"share: page {page} is free; only pages in use can be shared")
            self._shares[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One owner less; pages without owners become free. Raises ValueError on a double release."""
        for page in pages:
            if self._shares[page] < 1:
                raise ValueError(f"give_back: page {page} is not in use")
            self._shares[page] -= 1
            if self._shares[page] == 0:
                self._free.append(page)
