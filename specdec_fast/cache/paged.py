"""The paged key/value cache, the only writer of its tensors, page tables and lengths.

It knows nothing of models beyond the shapes of keys and values. Between steps, the `lengths[row]` committed tokens of a
row occupy positions 0..lengths - 1. Staged nodes follow them, and disappear unless committed.
Tests: tests/cache/test_paged.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from specdec_fast.cache.pages import PageAllocator
from specdec_fast.cache.prefix import PageNames
from specdec_fast.cache.shapes import LayerShape, fitting_into_memory
from specdec_fast.core.device_transfer import upload_values, write_entries
from specdec_fast.interfaces import Slots
from specdec_kernels import CacheTable, TreePlan, kv_commit, kv_slots


class PagedCache:
    """Keys and values of all layers in pages of `page_size` tokens.

    Args:
        layers: Shape of each layer.
        num_pages: Pages of the pool. Page 0 is the trash page.
        page_size: Tokens per page, 1 to 256.
        max_rows: Rows of the page table.
        max_length: Tokens per row.
        dtype: Dtype of keys and values.
        device: Device of all tensors.

    Attributes:
        keys: Keys by layer, [num_pages, page_size, heads, key_dim] each.
        values: Values by layer, [num_pages, page_size, heads, value_dim] each.
        page_table: Pages of each row in order, int32 [max_rows, ceil(max_length / page_size)].
        lengths: Committed tokens of each row, int32 [max_rows].
        pages: The allocator of the pool.
        unsettled: Rows with tokens of `provisional`. Between steps: rows where it was interrupted.

    Raises:
        ValueError: If `page_size` or `num_pages` is out of range, or if the pages do not fit into memory.
    """

    why_no_rollback: str | None = None
    """Why rows cannot be truncated to any length, or None."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= page_size <= 256:
            raise ValueError(f"page_size: got {page_size}; expected 1..256")
        self.page_size = page_size
        self.max_rows = max_rows
        self.max_length = max_length
        self.pages = PageAllocator(num_pages)
        self.device = torch.device(device)

        def pool(heads: int, dim: int) -> Tensor:
            return torch.zeros(num_pages, page_size, heads, dim, dtype=dtype, device=device)

        width = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
        size, remedy = num_pages * page_size * width * dtype.itemsize, "lower max_length or max_rows, or pass num_pages"
        with fitting_into_memory(f"{num_pages} pages of {page_size} tokens", size, self.device, remedy):
            self.keys = [pool(layer.num_kv_heads, layer.key_dim) for layer in layers]
            self.values = [pool(layer.num_kv_heads, layer.value_dim) for layer in layers]
        self._all = CacheTable([*self.keys, *self.values]) if layers else ()
        self.page_table = torch.zeros(max_rows, -(-max_length // page_size), dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._host_lengths = memoryview(self.lengths.numpy().data) if self.device.type == "cpu" else None  # quicker
        self._owned: list[list[int]] = [[] for _ in range(max_rows)]
        self.unsettled: set[int] = set()
        self._owner: weakref.ref[object] | None = None

    def __getstate__(self) -> dict[str, object]:
        """A copy has its own lengths and no owner."""
        return {**self.__dict__, "_host_lengths": None, "_owner": None}

    def claim(self, owner: object, rows: Collection[int] = ()) -> None:
        """Makes `owner` the only user of the cache, and frees the pages of all rows but `rows`.

        Such pages remain after an owner was dropped, or after an interrupted release. A new owner begins without names
        of pages.

        Args:
            owner: The engine that uses the cache from now on.
            rows: Rows that the owner occupies.

        Raises:
            ValueError: If another live owner, or a user that never claimed the cache, holds pages.
        """
        if self._owner is None or self._owner() is not owner:
            if any(self._owned) and not self._is_abandoned():
                raise ValueError(
                    "target: got one whose pages another user holds; expected one engine at a time: finish or "
                    "cancel the requests of the other engine, drafter or loop, drop it, or use separate targets"
                )
            self.pages.forget()
            self._owner = weakref.ref(owner)
        self.release([row for row, pages in enumerate(self._owned) if pages and row not in rows])

    def _is_abandoned(self) -> bool:
        """Whether there was an owner that no longer exists."""
        if self._owner is not None and self._owner() is not None:
            gc.collect()  # a caught exception may keep the frames of a dropped engine alive
        return self._owner is not None and self._owner() is None

    def pages_for(self, length: int) -> int:
        """Returns the number of pages that `length` tokens of a row occupy."""
        return -(-length // self.page_size)

    def reserve(self, row: int, length: int) -> bool:
        """Reserves pages for the first `length` tokens of a row.

        Args:
            row: The row.
            length: Tokens, staged nodes included.

        Returns:
            False, without any change, if the pool has too few free pages.

        Raises:
            ValueError: If `length` exceeds `max_length`.
        """
        if length > self.max_length:
            raise ValueError(f"reserve: got length {length} for row {row}; expected at most {self.max_length}")
        owned = self._owned[row]
        missing = self.pages_for(length) - len(owned)
        if missing <= 0:
            return True
        allocated = self.pages.allocate(missing)
        if allocated is None:
            return False
        start = len(owned)
        try:
            upload_values(allocated, self.page_table[row, start : start + missing])
        except BaseException:
            self.pages.free(allocated)
            raise
        owned.extend(allocated)  # last: an interruption before it frees the pages again
        return True

    def stage(
        self, rows: Tensor, offsets: Tensor, num_nodes: int, plan: TreePlan | None = None, *, advance: bool = False
    ) -> Slots:
        """Assigns slots to packed nodes: node i of row b at slot `lengths[b] + i`. The caller has reserved pages.

        Nodes behind `offsets[-1]` go to the trash page.

        Args:
            rows: Row of each request, int32 [B].
            offsets: First node of each request, int32 [B + 1].
            num_nodes: Nodes M of the packed axis.
            plan: Depths and ancestors of trees. None: causal chains.
            advance: Commit the nodes at once. For known tokens: prefill, and tokens that a draft model feeds itself.

        Returns:
            The places of the nodes.
        """
        depth, ancestors = (None, None) if plan is None else (plan.depth, plan.ancestors)
        table, lengths, slots, positions = kv_slots(
            self.page_table, self.lengths, rows, offsets, depth, num_nodes, self.page_size, advance
        )
        return Slots(table, lengths, offsets, slots, positions, ancestors, depth)

    def commit(
        self,
        rows: Tensor,
        slots: Slots,
        path: Tensor,
        num_accepted: Tensor,
        chains: Sequence[int] | None = None,
    ) -> None:
        """Keeps the accepted path of each request and drops the other nodes. Lengths grow by the path, root included.

        Args:
            rows: Row of each request, int32 [B].
            slots: The places of the staged nodes.
            path: Accepted nodes on the packed axis, root first and padded with -1, int32 [B, D + 1].
            num_accepted: Accepted draft nodes of each request, int32 [B].
            chains: The rows as host integers, if all drafts are chains and the host may read now. Nodes of chains need
                not move, so on a CPU only lengths change.
        """
        if chains is not None and self._host_lengths is not None:
            staged = [end - start for start, end in pairwise(slots.offsets.tolist())]
            for row, count, accepted in zip(chains, staged, num_accepted.tolist(), strict=True):
                self._host_lengths[row] += min(accepted + 1, count)
            return
        assert isinstance(self._all, CacheTable)
        kv_commit(self._all, slots.page_table, slots.lengths, path, slots.offsets, num_accepted, rows, self.lengths)

    def rollback(self, rows: Tensor | Sequence[int], lengths: Tensor | Sequence[int]) -> None:
        """Truncates rows to absolute lengths.

        Args:
            rows: B rows, int32 or host integers.
            lengths: New lengths, of the same kind. The values of tensors are not checked, since reading them would wait
                for the device.

        Raises:
            ValueError: If the numbers of rows and lengths differ, or if a host integer is negative or longer than the
                row: than its committed tokens on a CPU, than its pages on a GPU.
        """
        if isinstance(rows, Tensor) or isinstance(lengths, Tensor):
            if len(rows) != len(lengths):
                raise ValueError(f"rollback: got {len(lengths)} lengths for {len(rows)} rows; expected one for each")
            self.lengths[rows] = lengths  # type: ignore[assignment]
            return
        on_host = self.device.type == "cpu"
        for row, length in zip(rows, lengths, strict=True):
            held = int((self._host_lengths or self.lengths)[row]) if on_host else self._reserved(row)
            if not 0 <= length <= held:
                raise ValueError(f"rollback: got length {length} for row {row}; expected 0 to {held}, which it holds")
        self._write_lengths(rows, lengths)

    def rollback_point(self, row: int, length: int) -> int:
        """Returns the length to which a row is rolled back if it should have `length` tokens: that one."""
        return length

    @contextmanager
    def provisional(self, rows: Sequence[int], lengths: Sequence[int]) -> Iterator[None]:
        """Drops at its end all tokens that were stored inside of the context.

        Args:
            rows: B rows.
            lengths: Their present lengths.
        """
        self.unsettled.update(rows)
        try:
            yield
        finally:
            self.rollback(rows, lengths)
            self.unsettled.difference_update(rows)

    def set_lengths(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Sets the lengths of rows. Nodes that were staged behind the committed tokens may become committed.

        Args:
            rows: B rows.
            lengths: New lengths. Everything before them has been staged.

        Raises:
            ValueError: If a length is negative or exceeds the pages of its row.
        """
        for row, length in zip(rows, lengths, strict=True):
            if not 0 <= length <= self._reserved(row):
                expected = f"expected 0 to {self._reserved(row)}, for which it has pages"
                raise ValueError(f"set_lengths: got length {length} for row {row}; {expected}")
        self._write_lengths(rows, lengths)

    def _reserved(self, row: int) -> int:
        """Tokens for which a row has pages."""
        return len(self._owned[row]) * self.page_size

    def _write_lengths(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        if self._host_lengths is not None:  # a draft model does this in every step, so no operator is called
            for row, length in zip(rows, lengths):
                self._host_lengths[row] = length
        else:
            write_entries(rows, lengths, self.lengths)

    def fork(self, source: int, row: int, length: int) -> bool:
        """Makes an empty row share the first `length` tokens of another row. The last, partial page is copied.

        While both rows exist, neither may be rolled back into shared pages: nodes staged there would overwrite both.

        Args:
            source: The row to read from.
            row: The empty row.
            length: Tokens to share.

        Returns:
            False, without any change, if the pool has too few free pages.

        Raises:
            ValueError: If `row` already holds pages.
        """
        if self._owned[row]:
            raise ValueError(f"fork: row {row} already holds pages; release it first")
        shared = self._owned[source][: length // self.page_size]
        rest = length % self.page_size
        copied = self.pages.allocate(1) if rest else []
        if copied is None:
            return False
        self.pages.share(shared)
        owned = [*shared, *copied]
        try:
            if rest:
                origin = self._owned[source][len(shared)]
                for pool in self._all:
                    pool[copied[0], :rest] = pool[origin, :rest]
            if owned:
                upload_values(owned, self.page_table[row, : len(owned)])
        except BaseException:
            self.pages.free(owned)
            raise
        self.lengths[row] = length
        self._owned[row] = owned
        return True

    # -- pages that rows share by their names -------------------------------------------------------------------------

    def page_names(self, salt: str = "", kind: str = "") -> PageNames:
        """Returns the names of a text's pages. Texts with different salts or kinds (`prefix_kind`) share no page."""
        return PageNames(self.page_size, salt, kind)

    def find_pages(self, names: Sequence[bytes], *, with_states: bool = False) -> list[int]:
        """Returns the named pages with which a row can start (`PageAllocator.find`)."""
        return self.pages.find(names, with_states=with_states)

    def has_pages_for(self, length: int, shared: Sequence[int]) -> bool:
        """Returns whether an empty row can adopt pages and then reserve `length` tokens.

        Args:
            length: Tokens of the row, staged nodes included.
            shared: Pages that the row adopts.
        """
        return self.pages_for(length) - len(shared) <= self.pages.num_free_without(shared)

    def adopt(self, row: int, pages: Sequence[int]) -> None:
        """Makes a row without tokens start with the tokens of named pages, in place of its first own pages.

        The row may not be rolled back into these pages.

        Args:
            row: The row. It holds no tokens, but may have reserved pages.
            pages: Named pages (`PageAllocator.find`).
        """
        if not pages:
            return
        self.pages.share(pages)
        owned = self._owned[row]
        replaced, count = owned[: len(pages)], len(pages)
        try:
            upload_values(pages, self.page_table[row, :count])
            self.lengths[row] = count * self.page_size
            owned[:count] = pages
        except BaseException:  # the table may name shared pages, to which the row must not write
            self.pages.free(pages)
            self.page_table[row].zero_()
            self.release([row])
            raise
        self.pages.num_hits += count
        self.pages.free(replaced)

    def name_pages(self, row: int, names: Sequence[bytes], states: Sequence[Any] = ()) -> None:
        """Names the first pages of a row, so that other rows can adopt them.

        Args:
            row: The row. All tokens of these pages are committed, and it is not rolled back into them.
            names: Names of the first pages (`PageNames.upto`).
            states: For each page, what is kept with its name (`PageAllocator.states`).
        """
        for at, (page, name) in enumerate(zip(self._owned[row], names)):
            self.pages.name(page, name, states[at] if states else None)

    def release(self, rows: Sequence[int]) -> None:
        """Frees all pages of rows. Calling it twice is harmless."""
        for row in rows:
            self.unsettled.discard(row)
            self.lengths[row] = 0
            owned, self._owned[row] = self._owned[row], []
            if owned:
                self.page_table[row].zero_()
                # last: an interruption before it loses pages, but no row reads a wrong one; reversed: the end of a text
                # is evicted before its beginning, which more texts share
                self.pages.free(reversed(owned))
        if self.pages.num_used and not any(self._owned):  # lost by an interruption of an earlier call
            self.pages.reset()

    def read(self, row: int, layer: int) -> tuple[Tensor, Tensor]:
        """Copies a row's committed keys and values of one layer, for tests.

        Args:
            row: The row.
            layer: Index of the layer.

        Returns:
            Keys and values, [length, heads, dim] each.
        """
        length = int(self.lengths[row])
        positions = torch.arange(length, device=self.device)
        pages = self.page_table[row][positions // self.page_size].long()
        places = pages, positions % self.page_size
        return self.keys[layer][places], self.values[layer][places]
