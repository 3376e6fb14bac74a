"""Key/value caches."""

from specdec_fast.cache.paged import PagedCache
from specdec_fast.cache.pages import PageAllocator
from specdec_fast.cache.prefix import PageNames

__all__ = ["PageAllocator", "PageNames", "PagedCache"]
