"""CacheTable: addresses and strides of a set of caches, read once for all commits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def slot_layout(cache: Tensor) -> list[int]:
    """Returns [address, bytes between pages, bytes between slots, runs per slot, bytes between runs, bytes per run].

    A run is a part of a slot that is contiguous in memory: the whole slot for [pages, page_size, heads, D], one head of
    it for a head-first cache.

    Raises:
        ValueError: If a slot does not consist of equally spaced runs.
    """
    size = cache.element_size()
    run, axis = 1, cache.dim() - 1
    while axis >= 2 and (cache.shape[axis] == 1 or cache.stride(axis) == run):
        run *= cache.shape[axis]
        axis -= 1
    outer = [a for a in range(2, axis + 1) if cache.shape[a] != 1]
    if cache.dim() < 2 or len(outer) > 1:
        raise ValueError(
            f"kv_commit: a cache has shape {list(cache.shape)} and strides {list(cache.stride())}, expected "
            "[pages, page_size, heads, width] with a contiguous last axis; pass the cache itself or a view "
            "that only swaps two axes"
        )
    runs, spacing = (cache.shape[outer[0]], cache.stride(outer[0])) if outer else (1, run)
    return [
        cache.data_ptr(),
        cache.stride(0) * size,
        cache.stride(1) * size,
        runs,
        spacing * size,
        run * size,
    ]


class CacheTable:
    """A prepared list of caches for `kv_commit`: addresses and strides are read once, at construction.

    A table is a sequence of its caches and keeps them alive. It is stale once a cache is reallocated (`set_`,
    `resize_`); make a new one then. The addresses are on the device of the caches, so that a graph can be replayed.

    Args:
        caches: Tensors [pages, page_size, ...] on one device with equal first two sizes.

    Attributes:
        caches: The tensors.
        pages: Pages of each cache.
        page_size: Slots of a page.
        layout: Result of `slot_layout` for each cache, int64 [n, 6], on the host.
        device_layout: The same on the device of the caches.
        slot_bytes: Bytes of a slot in each cache.

    Raises:
        ValueError: If the list is empty, pages differ, devices differ, or a layout is not supported.
    """

    __slots__ = ("caches", "device_layout", "layout", "page_size", "pages", "slot_bytes")

    def __init__(self, caches: Sequence[Tensor]) -> None:
        self.caches = tuple(caches)
        if not self.caches:
            raise ValueError("kv_commit: the list of caches is empty, expected at least one tensor")
        first = self.caches[0]
        for cache in self.caches:
            if cache.shape[:2] != first.shape[:2] or cache.device != first.device:
                raise ValueError(
                    f"kv_commit: a cache is {list(cache.shape)} on {cache.device}, expected pages and page "
                    f"size {list(first.shape[:2])} on {first.device} like the first; "
                    "one table serves one page table"
                )
        self.pages, self.page_size = first.shape[:2]
        # int64 [n, 6], on the host and where the kernels read it
        self.layout = torch.tensor([slot_layout(c) for c in self.caches], dtype=torch.int64)
        self.device_layout = self.layout.to(first.device)
        self.slot_bytes: list[int] = (self.layout[:, 3] * self.layout[:, 5]).tolist()

    @classmethod
    def packed(cls, nodes: Sequence[Tensor]) -> CacheTable:
        """Returns the table of a scratch, tensors [M, ...] of packed nodes, as a cache of one page."""
        return cls([each[None] for each in nodes])

    def holding(self, caches: Sequence[Tensor]) -> CacheTable:
        """Makes a table with the addresses and strides of this one that keeps other tensors alive.

        Args:
            caches: Tensors with the shapes, strides, dtypes, device and addresses of this table's own, in their order;
                they are not compared. None at all, (): the new table keeps nothing alive, and has length 0.

        Returns:
            A new table, which shares `layout` and `device_layout` with this one. Nothing is copied to the device.
        """
        made = CacheTable.__new__(CacheTable)
        for name in self.__slots__:
            setattr(made, name, getattr(self, name))
        made.caches = tuple(caches)
        return made

    def __reduce__(self) -> tuple[type[CacheTable], tuple[tuple[Tensor, ...]]]:
        return CacheTable, (self.caches,)  # a copy has addresses of its own

    def __getitem__(self, index: int) -> Tensor:
        return self.caches[index]

    def __len__(self) -> int:
        return len(self.caches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.caches)


def make_tables(
    caches: Sequence[Tensor] | CacheTable, scratch: Sequence[Tensor] | CacheTable
) -> tuple[CacheTable, CacheTable]:
    """Returns the tables of caches and of their scratch. Raises ValueError if a scratch does not fit its cache."""
    into = caches if isinstance(caches, CacheTable) else CacheTable(caches)
    out_of = scratch if isinstance(scratch, CacheTable) else CacheTable.packed(scratch)
    fits = len(into) == len(out_of) and into.slot_bytes == out_of.slot_bytes and out_of.pages == 1
    if not fits or any(to.dtype != held.dtype for to, held in zip(into, out_of, strict=True)):
        got, want = (
            [f"{each.dtype} {list(each.shape[2:])}" for each in table[:3]] for table in (out_of.caches, into.caches)
        )
        raise ValueError(
            f"kv_commit_scratch: slots of {len(out_of)} scratch tensors are {got}, expected those of the {len(into)} "
            f"caches, {want}; pass one tensor [M, ...] per cache"
        )
    return into, out_of
