"""The page allocator of the key/value pool. It knows nothing of tensors.

Page 0 is the trash page: padding nodes write to it, and no row reads it. Tests: tests/cache/test_pages.py.
"""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """A free list over pages 1..num_pages - 1 with reference counts, since forked rows share pages.

    Args:
        num_pages: Pages of the pool, the trash page included.

    Raises:
        ValueError: If `num_pages` is below 2.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages: got {num_pages}; expected at least 2 (page 0 is the trash page)")
        self.num_pages = num_pages
        self._free: list[int] = []
        self._num_owners: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Frees all pages."""
        self._free = list(range(self.num_pages - 1, 0, -1))
        self._num_owners = [0] * self.num_pages

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of pages in use."""
        return self.num_pages - 1 - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Allocates pages.

        Args:
            count: Number of pages.

        Returns:
            The pages, or None, without any change, if fewer are free.
        """
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._num_owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to pages in use.

        Raises:
            ValueError: If a page is free.
        """
        for page in pages:
            if self._num_owners[page] < 1:
                raise ValueError(f"share: page {page} is free; only pages in use can be shared")
            self._num_owners[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Removes an owner from pages; pages without owners become free.

        Raises:
            ValueError: If a page is not in use.
        """
        for page in pages:
            if self._num_owners[page] < 1:
                raise ValueError(f"free: page {page} is not in use")
            self._num_owners[page] -= 1
            if self._num_owners[page] == 0:
                self._free.append(page)
