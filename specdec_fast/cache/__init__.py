"""Key/value caches."""

from specdec_fast.cache.paged import PagedCache
from specdec_fast.cache.pages import PageAllocator

__all__ = ["PageAllocator", "PagedCache"]
