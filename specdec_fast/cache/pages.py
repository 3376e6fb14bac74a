"""The page allocator of the key/value pool. It knows nothing of tensors.

Page 0 is the trash page: padding nodes write to it, and no row reads it. Tests: tests/cache/test_pages.py,
tests/cache/test_prefix_programs.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any


class PageAllocator:
    """A free list over pages 1..num_pages - 1 with reference counts, since rows share pages.

    A page may have a name that stands for its contents (`PageNames`). A named page without owners counts as free, but
    keeps its contents until the allocator needs it. Pages without names are allocated first, then the named pages whose
    last use is the longest ago.

    Args:
        num_pages: Pages of the pool, the trash page included.

    Attributes:
        num_pages: Pages of the pool, the trash page included.
        num_hits: Named pages that were shared with another row, counted from the start.
        num_evictions: Named pages whose contents were given up, counted from the start.

    Raises:
        ValueError: If `num_pages` is below 2.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages: got {num_pages}; expected at least 2 (page 0 is the trash page)")
        self.num_pages = num_pages
        self.num_hits = self.num_evictions = 0
        self.reset()

    def reset(self) -> None:
        """Frees all pages and drops their names."""
        self._free = list(range(self.num_pages - 1, 0, -1))
        self._num_owners = [0] * self.num_pages
        self._unowned: OrderedDict[int, None] = OrderedDict()  # named pages without owners, the oldest use first
        self._name_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._states: dict[bytes, Any] = {}
        self._snapshots: OrderedDict[bytes, Any] = OrderedDict()  # the oldest use first

    @property
    def num_free(self) -> int:
        """Number of free pages, named pages without owners included."""
        return len(self._free) + len(self._unowned)

    @property
    def num_used(self) -> int:
        """Number of pages that have an owner."""
        return self.num_pages - 1 - self.num_free

    @property
    def num_named(self) -> int:
        """Number of pages that can be found by their names."""
        return len(self._page_of)

    def allocate(self, count: int) -> list[int] | None:
        """Allocates pages, which have no names.

        Args:
            count: Number of pages.

        Returns:
            The pages, or None, without any change, if fewer are free.
        """
        if count > self.num_free:
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._num_owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to pages that are in use or have a name.

        Raises:
            ValueError: If a page is free and has no name.
        """
        for page in pages:
            if self._num_owners[page] < 1 and page not in self._name_of:
                raise ValueError(f"share: page {page} is free; only pages in use or with a name can be shared")
            self._num_owners[page] += 1
            self._unowned.pop(page, None)

    def free(self, pages: Iterable[int]) -> None:
        """Removes an owner from pages; pages without owners become free.

        Among named pages that become free in one call, the first one is evicted first.

        Raises:
            ValueError: If a page is not in use.
        """
        for page in pages:
            if self._num_owners[page] < 1:
                raise ValueError(f"free: page {page} is not in use")
            self._num_owners[page] -= 1
            if self._num_owners[page] == 0:
                if page in self._name_of:
                    self._unowned[page] = None
                else:
                    self._free.append(page)

    # -- names --------------------------------------------------------------------------------------------------------

    def name(self, page: int, name: bytes, states: Any = None) -> None:
        """Names a page in use, unless it has a name or another page has this one.

        Args:
            page: The page. Nothing may write to it while it has the name.
            name: Stands for the contents.
            states: Anything that is kept with the name and dropped with it.
        """
        if page in self._name_of or name in self._page_of:
            return
        self._name_of[page] = name  # first: an interruption leaves no name that finds another content
        if states is not None:
            self._states[name] = states
        self._page_of[name] = page

    def find(self, names: Sequence[bytes], *, with_states: bool = False) -> list[int]:
        """Returns the pages of the first names, up to the first name that no page has.

        Args:
            names: Names in order.
            with_states: Stop at the first name without states too.
        """
        pages: list[int] = []
        for name in names:
            page = self._page_of.get(name)
            if page is None or (with_states and name not in self._states):
                break
            pages.append(page)
        return pages

    def states(self, name: bytes) -> Any:
        """Returns what `name` kept with a name."""
        return self._states[name]

    def keep_snapshot(self, name: bytes, snapshot: Any, most: int) -> None:
        """Keeps the state of a row at the end of a named page, until its name is dropped.

        Args:
            name: Name of the page. Without such a page nothing is kept.
            snapshot: The state.
            most: Snapshots to keep. The one whose last use is the longest ago is dropped first.
        """
        if name in self._page_of:
            self._snapshots[name] = snapshot
            self._snapshots.move_to_end(name)
            while len(self._snapshots) > most:
                self._snapshots.popitem(last=False)

    def snapshot(self, page: int) -> Any:
        """Returns the state that was kept at the end of a named page."""
        name = self._name_of[page]
        self._snapshots.move_to_end(name)
        return self._snapshots[name]

    def drop_snapshots(self) -> None:
        """Drops all snapshots. Pages keep their names."""
        self._snapshots.clear()

    def upto_snapshot(self, pages: Sequence[int]) -> list[int]:
        """Returns the first of these named pages, up to the last one with a snapshot."""
        count = next((at for at in range(len(pages), 0, -1) if self._name_of[pages[at - 1]] in self._snapshots), 0)
        return list(pages[:count])

    def num_free_without(self, pages: Sequence[int]) -> int:
        """Returns the number of free pages besides `pages`."""
        return self.num_free - sum(page in self._unowned for page in pages)

    def forget(self) -> None:
        """Drops all names. Rows keep their pages."""
        self._page_of, self._states = {}, {}
        self._snapshots.clear()
        unowned, self._unowned = self._unowned, OrderedDict()
        self._name_of = {}
        self._free.extend(unowned)

    def _evict(self) -> int:
        """Takes the named page without owners whose last use is the longest ago, and drops its name."""
        page, _ = self._unowned.popitem(last=False)
        name = self._name_of[page]
        if self._page_of.pop(name, None) is not None:
            self.num_evictions += 1
        self._states.pop(name, None)
        self._snapshots.pop(name, None)
        del self._name_of[page]
        return page
